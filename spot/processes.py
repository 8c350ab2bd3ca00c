"""The distributed state of this process, as started by `accelerate launch` or `torchrun`."""

import torch
from accelerate import PartialState


def this_process() -> PartialState:
    """Its device, its index and the number of processes. A single process has index 0 of 1."""
    # Without a GPU, accelerate needs cpu=True, or processes started by torchrun do not connect.
    return PartialState(cpu=not torch.accelerator.is_available())
