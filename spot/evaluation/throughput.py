"""How fast models are beside each other, and beside what their multiply-adds promise.

Absolute times say little on a shared machine, so models run in turns, in one process, on the same
images. In every round each model is timed once; a speed-up is the median over rounds of the first
model's time by the other's, and stands beside the MAC ratio, which it can be held against.

Where other programs compete for the processor, one thread timed by the processor time it used is
steadier by far than by the clock on the wall.
"""

import copy
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import timm
import torch
import torch._dynamo
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spot import report
from spot.errors import InputError
from spot.evaluation.cost import image_shape, macs
from spot.models.baselines import BASELINES
from spot.models.checkpoints import built_in, load
from spot.models.protocol import Placed, TokenModel
from spot.models.spot_vit import SpotViT, adapt
from spot.placement.sizes import Scale

K = TypeVar("K")
Precision = Literal["float32", "bfloat16"]
Clock = Literal["wall", "processor"]
CLOCKS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def bench(
    models: Sequence[str],
    *,
    tokens: Sequence[int] = (),
    baselines: Sequence[str] = (),
    prior: str | None = None,
    scale: Scale | None = None,
    device: str = "cpu",
    threads: int | None = None,
    **timing: Any,
) -> list[dict[str, Any]]:
    """Rows of `measure` for every model, method and budget: what `spot bench` does.

    Args:
        tokens: budgets; by default an eighth, a quarter, half and all of the patch grid.
        scale: of the windows that models place; by default their own.
        timing: of `measure`: batch_sizes, rounds, compiled, precision, clock.
    """
    entries: dict[str, TokenModel] = {}
    about: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(models):
        for method, budget, model in candidates(opened(name, device, scale), tokens, baselines, prior):
            label = f"{name} {method} {budget}"
            entries[label] = model
            about[label] = {"name": name, "method": method, "budget": budget}
    with cpu_threads(threads):
        rows = measure(entries, shown=True, **timing)
    return [{**about[row.pop("model")], **row} for row in rows]


def opened(name: str, device: str, scale: Scale | None = None) -> SpotViT:
    """A model on a device, with this scale if given. A timm name gets random weights, which are as fast as any."""
    try:
        there = torch.device(device)
        torch.empty(0, device=there)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the device {device!r} cannot be used here: {reason}") from None
    bare = name.removeprefix("timm/").split(".")[0]
    if name not in built_in() and not Path(name).exists() and timm.is_model(bare):
        model = adapt(bare).to(there).eval()
    else:
        model = load(name).to(there)
    model.scale = model.scale if scale is None else scale
    return model


def candidates(
    model: SpotViT, tokens: Sequence[int], baselines: Sequence[str], prior: str | None
) -> list[tuple[str, int, TokenModel]]:
    """(method, budget, model) of everything to time, all sharing the one model's weights."""
    cells = len(model.grid())
    budgets = list(dict.fromkeys(tokens)) or sorted({-(-cells // part) for part in (8, 4, 2, 1)})
    dense = [name for name in baselines if BASELINES[name].dense]
    others = [name for name in baselines if not BASELINES[name].dense]
    chosen: list[tuple[str, int, TokenModel]] = [(name, cells, BASELINES[name].build(model)) for name in dense]
    for budget in budgets:
        chosen.append(("spot", budget, Placed(model, budget, prior)))
        chosen += [(name, budget, BASELINES[name].build(model, budget)) for name in others]
    return chosen


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as a person reads them."""
    several = len({row["name"] for row in rows}) > 1
    lines = []
    for row in rows:
        line: dict[str, Any] = {"model": row["name"]} if several else {}
        line |= {"method": row["method"], "tokens": row["budget"]}
        line |= {"speed-up": f"{row['speed-up']:.2f}×", "by MACs": f"{row['MAC ratio']:.2f}×"}
        line |= {"images/s": f"{row['images/s']:.3g} ±{row['spread']:.0%}"}
        lines.append(line | {"tokenizer": f"{row['tokenizer']:.0%}", "MB": f"{row['peak MB']:.3g}"})
    return lines


def explained(rows: Sequence[dict[str, Any]]) -> str:
    """How to read the tables."""
    first = rows[0]
    text = (
        f"Speed-ups are relative to {first['method']} at {first['budget']} tokens, medians over rounds in turns. "
        "± is the middle half of the times, tokenizer the share until the first block begins, MB what is alive at once."
    )
    if any(row["method"] == "tome-cost" for row in rows):
        text += " tome-cost begins with all tokens and merges until its blocks cost as much as the budget."
    return text


def measure(
    models: Mapping[str, TokenModel],
    *,
    batch_sizes: Sequence[int] = (1, 32),
    rounds: int = 11,
    warm_up: int = 2,
    compiled: bool = False,
    precision: Precision = "float32",
    clock: Clock = "wall",
    shape: tuple[int, ...] | None = None,
    shown: bool = False,
) -> list[dict[str, Any]]:
    """Time models in turns: one row per batch size and model, with its ratio to the first model.

    Args:
        models: by the name that the rows get; each is called `model(images)` on its own device.
        rounds: how often every model is timed. Medians are over rounds, and the spread is the
            middle half of the times as a share of their median.
        warm_up: untimed calls of every model at every batch size (compilation happens here).
        compiled: through torch.compile.
        precision: bfloat16 casts a copy of the model and needs a device with the arithmetic for it.
        clock: processor time is this process's, summed over its threads; for the CPU with one thread.
        shape: (C, H, W) of the images, by default what the models were built for.

    A row's columns: model, batch, tokens, GMACs for one image, MAC ratio (the first model's MACs by
    this one's), speed-up (its time by this one's) with the ends low and high of its 95 % interval,
    images/s, spread, tokenizer (share of the time
    until the first block begins) and peak MB (tensors alive at once beyond the weights, while one
    batch runs). The last two are always measured eagerly.
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
    ready = prepared(models, precision)
    timed = {name: torch.compile(model, dynamic=False) if compiled else model for name, model in ready.items()}
    costs = {name: macs(model, shape) for name, model in models.items()}
    first = next(iter(models))

    rows = []
    with torch.no_grad(), many_graphs(), report.progress(shown=shown) as bar:
        task = bar.add_task("timing", total=len(batch_sizes) * rounds)
        for batch in batch_sizes:
            images = pictures(batch, shape, next(iter(ready.values())))
            for model in timed.values():
                for _ in range(warm_up):
                    model(images)
            seconds = interleaved(timed, images, rounds, clock, lambda: bar.advance(task))
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
                        "spread": spread(seconds[name]),
                        "tokenizer": tokenizer_share(model, images, clock),
                        "peak MB": peak_bytes(model, images) / 1e6,
                    }
                )
    return rows


def interleaved(
    models: Mapping[K, Callable[[Tensor], Any]],
    images: Tensor,
    rounds: int,
    clock: Clock = "wall",
    done: Callable[[], None] = lambda: None,
) -> dict[K, list[float]]:
    """Seconds of every model in every round. Each round begins with another model, so that none is always first."""
    names, now = list(models), CLOCKS[clock]
    seconds: dict[K, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            wait_for(images.device)
            start = now()
            models[name](images)
            wait_for(images.device)
            seconds[name].append(now() - start)
        done()
    return seconds


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of values, equally far from both ends, with the true median between them in 95 % of cases.

    Whatever the distribution: each value lies above the median as often as a coin shows heads. Of
    fewer than six values no pair is that sure, and these are the least and the greatest.
    """
    ordered, count = sorted(values), len(values)
    outside, inset = 0.0, 0  # the chance that the median lies beyond the pair
    while inset < (count - 1) // 2:
        outside += 2 * math.comb(count, inset) / 2**count
        if outside + 2 * math.comb(count, inset + 1) / 2**count > 0.05:
            break
        inset += 1
    return ordered[inset], ordered[count - 1 - inset]


def spread(seconds: Sequence[float]) -> float:
    """The middle half of the times as a share of their median."""
    low, high = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75], dtype=torch.float64))
    return float(high - low) / median(seconds)


def tokenizer_share(model: TokenModel, images: Tensor, clock: Clock = "wall") -> float:
    """Median share of a call that passes before the first block begins: placing, sampling and embedding tokens."""
    now = CLOCKS[clock]
    begun: list[float] = []

    def begin(*_: Any) -> None:
        wait_for(images.device)
        begun.append(now())

    # A block may be called in parts (ToMe), so the first of its parts to begin counts.
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


def peak_bytes(model: Callable[[Tensor], Any], images: Tensor) -> int:
    """Most bytes alive at once during a call, beyond weights and images, as operators hand them out.

    What a fused kernel keeps to itself is not seen; on CUDA the allocator is asked instead, and it is.
    """
    if images.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(images.device)
        before = torch.cuda.memory_allocated(images.device)
        model(images)
        return torch.cuda.max_memory_allocated(images.device) - before
    with _Peak() as peak:
        model(images)
    return peak.most


class _Peak(TorchDispatchMode):
    """Counts the bytes of storages that come out of operators and have not been freed."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in inputs or key in self.seen:  # a view or the same tensor again
                continue
            self.seen.add(key)
            self.alive += size
            weakref.finalize(storage, self._freed, key, size)
        self.most = max(self.most, self.alive)
        return result

    def _freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.alive -= size


def prepared(models: Mapping[str, TokenModel], precision: Precision) -> dict[str, Any]:
    """The models for inference; copies where they have to be cast, which still share what they shared."""
    ready: dict[str, Any] = dict(models)
    if precision == "bfloat16":
        device = next(next(iter(models.values())).parameters()).device
        if not has_bfloat16(device):
            raise InputError(f"this {device.type} has no bfloat16 arithmetic; it would be slower than float32")
        ready = {name: model.to(torch.bfloat16) for name, model in copy.deepcopy(ready).items()}
    return {name: model.eval() for name, model in ready.items()}


def many_graphs() -> Any:
    """Let torch.compile keep a graph for every model: past eight of a kind it would go back to eager unasked."""
    return torch._dynamo.config.patch(recompile_limit=1000)


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device calculates in bfloat16 itself."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device.type == "mps"


def pictures(batch: int, shape: tuple[int, ...], model: TokenModel) -> Tensor:
    """Noise of the model's device and dtype; what is in the images does not change the time."""
    parameter = next(model.parameters())
    images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
    return images.to(parameter.device, parameter.dtype)


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """So many CPU threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    if count is not None:
        if count < 1:
            raise InputError(f"at least one thread is needed, got {count}")
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
