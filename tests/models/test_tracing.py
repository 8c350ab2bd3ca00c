"""Every way of writing a model down gives what the model gives, also for positions that it was not traced with."""

import io
import warnings

import pytest
import torch

from tests.conftest import make_nano

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
FIRST, OTHER = (torch.rand(2, 5, 2, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


def by_jit(model):
    return torch.jit.trace(model, (IMAGES, FIRST))


def by_export(model):
    batch, tokens = torch.export.Dim("batch", min=2), torch.export.Dim("tokens", min=2)
    shapes = {"images": {0: batch}, "positions": {0: batch, 1: tokens}}
    written = torch.export.export(model, (IMAGES, FIRST), dynamic_shapes=shapes).module()
    images, positions = torch.randn(3, 3, 32, 32), torch.rand(3, 7, 2)  # another batch, another budget
    torch.testing.assert_close(written(images, positions), model(images, positions), atol=1e-5, rtol=1e-5)
    return written


def by_compile(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def by_onnx(model, *, dynamo):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = io.BytesIO()
    names = {"input_names": ["images", "positions"], "output_names": ["logits"]}
    if dynamo:
        program = torch.onnx.export(model, (IMAGES, FIRST), dynamo=True, verbose=False, **names)
        program.save(file)
    else:
        torch.onnx.export(model, (IMAGES, FIRST), file, dynamo=False, opset_version=18, **names)
    session = onnxruntime.InferenceSession(file.getvalue())
    return lambda *given: torch.from_numpy(
        session.run(None, {name: each.numpy() for name, each in zip(names["input_names"], given, strict=True)})[0]
    )


def by_old_onnx(model):
    return by_onnx(model, dynamo=False)


def by_new_onnx(model):
    return by_onnx(model, dynamo=True)


@pytest.mark.parametrize("write", [by_jit, by_export, by_compile, by_old_onnx, by_new_onnx])
@torch.no_grad()
def test_what_was_written_down_is_the_model(write):
    model = make_nano()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracers warn of what they take for constants
        written = write(model)
    for positions in (FIRST, OTHER, model.grid(IMAGES)[:, :5]):
        torch.testing.assert_close(written(IMAGES, positions), model(IMAGES, positions), rtol=1e-4, atol=1e-4)
