"""This process among those that `accelerate launch` or `torchrun` started together."""

import torch
from accelerate import PartialState


def this_process() -> PartialState:
    """Its device, its number and how many there are; alone, it is number 0 of 1."""
    # Without an accelerator accelerate must be told so, or torchrun's processes would not find each other.
    return PartialState(cpu=not torch.accelerator.is_available())
