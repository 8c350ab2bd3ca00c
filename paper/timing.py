"""Interleaved timing of models: speed-ups over the first model, with intervals, and ratios of multiply-adds.

In every round each model is timed once. A speed-up is the median over rounds of the first model's time divided
by the other's.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from spot import report
from spot.errors import InputError
from spot.evaluation.cost import image_shape, macs
from spot.evaluation.throughput import CLOCKS, Clock, interleaved, wait_for
from spot.models.wrappers import TokenModel


def measure(
    models: Mapping[str, TokenModel],
    *,
    batch_sizes: Sequence[int] = (1, 32),
    rounds: int = 11,
    warm_up: int = 2,
    clock: Clock = "wall",
    shape: tuple[int, ...] | None = None,
    shown: bool = False,
) -> list[dict[str, Any]]:
    """Time models in turns: one row per batch size and model, with its ratio to the first model.

    Args:
        models: by their name in the rows; each is called `model(images)` on its own device.
        rounds: number of times that every model is timed. Medians are over rounds.
        warm_up: number of untimed calls of every model at every batch size.
        clock: processor time is this process's, summed over its threads; for the CPU with one thread.
        shape: (C, H, W) of the images, by default the size that the models were built for.

    A row's columns: model, batch, tokens, GMACs for one image, MAC ratio (the first model's MACs by
    this one's), speed-up (its time by this one's) with the ends low and high of its 95 % interval, and
    images/s.
    """
    if not models:
        raise InputError("there is no model to time")
    if rounds < 1 or warm_up < 0 or not batch_sizes or min(batch_sizes) < 1:
        raise InputError("timing needs at least one round and batches of at least one image")
    shapes = {image_shape(model) for model in models.values()} if shape is None else {shape}
    if len(shapes) > 1:
        sizes = " and ".join(" × ".join(map(str, each)) for each in sorted(shapes))
        raise InputError(f"these models were built for images of different sizes, {sizes}; time them one by one")
    (shape,) = shapes
    devices = {str(next(model.parameters()).device) for model in models.values()}
    if len(devices) > 1:
        raise InputError(f"models are on {', '.join(sorted(devices))}; move them to one device")
    if clock == "processor" and (devices != {"cpu"} or torch.get_num_threads() > 1):
        raise InputError("processor time measures one CPU thread; time other devices, and several, by the wall clock")
    ready: dict[str, Any] = {name: model.eval() for name, model in models.items()}
    costs = {name: macs(model, shape) for name, model in models.items()}
    first = next(iter(models))

    rows = []
    with torch.no_grad(), report.progress(shown=shown) as bar:
        task = bar.add_task("timing", total=len(batch_sizes) * rounds)
        for batch in batch_sizes:
            images = pictures(batch, shape, next(iter(ready.values())))
            for model in ready.values():
                for _ in range(warm_up):
                    model(images)
            seconds = interleaved(ready, images, rounds, clock, lambda: bar.advance(task))
            for name, model in ready.items():
                ratios = [a / b for a, b in zip(seconds[first], seconds[name], strict=True)]
                low, high = median_interval(ratios)
                rows.append(
                    {
                        "model": name,
                        "batch": batch,
                        "tokens": model.tokens,
                        "GMACs": costs[name] / 1e9,
                        "MAC ratio": costs[first] / costs[name],
                        "speed-up": median(ratios),
                        "speed-up low": low,
                        "speed-up high": high,
                        "images/s": batch / median(seconds[name]),
                    }
                )
    return rows


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median: the narrowest pair of order statistics, symmetric in rank.

    It holds for any distribution, because each value lies above the median with probability 1/2. Fewer
    than six values cannot reach 95 %, and the result is then their minimum and maximum.
    """
    ordered, count = sorted(values), len(values)
    outside, inset = 0.0, 0  # the probability that the median lies outside
    while inset < (count - 1) // 2:
        outside += 2 * math.comb(count, inset) / 2**count
        if outside + 2 * math.comb(count, inset + 1) / 2**count > 0.05:
            break
        inset += 1
    return ordered[inset], ordered[count - 1 - inset]


def tokenizer_share(model: TokenModel, images: Tensor, clock: Clock = "wall") -> float:
    """Median share of a call before the first block begins: placing, sampling and embedding tokens."""
    now = CLOCKS[clock]
    begun: list[float] = []

    def begin(*_: Any) -> None:
        wait_for(images.device)
        begun.append(now())

    # A block may be called in parts (ToMe), so the first part to begin counts.
    hooks = [part.register_forward_pre_hook(begin) for part in model.spot_vit.vit.blocks[0].modules()]
    shares = []
    try:
        for _ in range(5):
            begun.clear()
            wait_for(images.device)
            start = now()
            model(images)
            wait_for(images.device)
            shares.append((begun[0] - start) / max(now() - start, 1e-9))
    finally:
        for hook in hooks:
            hook.remove()
    return median(shares)


def pictures(batch: int, shape: tuple[int, ...], model: TokenModel) -> Tensor:
    """Noise on the model's device and in its dtype; the images' content does not affect the time."""
    parameter = next(model.parameters())
    images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
    return images.to(parameter.device, parameter.dtype)
