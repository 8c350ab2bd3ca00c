"""A GPU that is not there: torch's fake tensors say `cuda` and refuse to mix devices, and hold no numbers.

Within `fake_cuda()` every tensor is fake. What code asks of their values is answered so that checks pass: all() is
True, any() is False, nothing is nonzero, an integer is 0, any other number 1.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

aten = torch.ops.aten
NONE = (aten.any.default, aten.any.dim, aten.any.dims)


class Answering(FakeTensorMode):
    """Fake tensors whose values can be asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default:
            value = args[0]
            if value.dtype == torch.bool:
                return not getattr(value, "none", False)
            return 1.0 if value.is_floating_point() else 0
        if func is aten.nonzero.default:
            return self.empty((0, args[0].ndim), torch.int64, args[0].device)
        if func is aten.index.Tensor and any(each is not None and each.dtype == torch.bool for each in args[1]):
            return self.empty((0,), args[0].dtype, args[0].device)
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func in NONE:
            result.none = True
        return result

    def empty(self, shape, dtype, device):
        how = {"dtype": dtype, "device": device}
        return super().__torch_dispatch__(aten.empty.memory_format, (), (list(shape),), how)


@contextmanager
def fake_cuda(monkeypatch):
    """Within the block all tensors are fake."""
    whole = torch.Tensor.tolist

    def tolist(self):
        return zeros(self.shape) if isinstance(self, FakeTensor) else whole(self)

    with monkeypatch.context() as patch, Answering(allow_non_fake_inputs=True) as mode:
        patch.setattr(torch.Tensor, "tolist", tolist)
        patch.setattr("spot.placement.priors.SobolEngine", Points)
        # Autograd's engine asks the driver for its devices, so gradients are made up; what they are of is checked.
        patch.setattr(torch.autograd, "grad", lambda loss, given, **how: (torch.empty_like(given),))
        yield mode


def zeros(shape):
    return [zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


class Points:
    """A Sobol engine whose operator has no fake twin."""

    def __init__(self, dimension):
        self.dimension = dimension

    def draw(self, count, **how):
        return torch.rand(count, self.dimension, **how)


def moved(model, mode):
    """The model, its parameters and buffers on fake cuda."""

    def there(tensor):
        tensor = tensor.detach()
        return (tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)).to("cuda")

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type != "cuda":
                module._parameters[name] = nn.Parameter(there(parameter), requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = there(buffer)
    return model
