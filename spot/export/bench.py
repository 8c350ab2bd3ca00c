"""Models, budgets and runtimes timed in turns: how much less time fewer tokens take, and what accuracy they keep.

In every runtime the plain ViT and each method at each budget run in turns on the same images. With one thread of a
CPU times are the processor's, because other programs disturb them least; otherwise the wall clock's. A ratio is the
median over rounds of the dense time by the other; its quartiles say how steady it was.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import timm
import torch
from torch import Tensor, nn

from spot import report
from spot.errors import InputError, unknown
from spot.evaluation.cost import image_shape, macs
from spot.evaluation.throughput import cpu_threads, interleaved, many_graphs
from spot.export.files import export, require_onnx
from spot.export.runtime import Exported
from spot.models.baselines import BASELINES
from spot.models.family import Source, at_budget, dense_model
from spot.models.loading import load, load_source
from spot.models.shipped import ALIASES, list_models
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.models.wrappers import PlainViT, TokenModel
from spot.placement.sizes import Scale

Runtime = Literal["eager", "compile", "onnx"]
PLAIN = "plain"


@dataclass(frozen=True)
class Timed:
    """One line of the table: what is run, and what is known of it."""

    model: str
    method: str
    tokens: int | None
    module: Any  # a TokenModel, or a timm model
    accuracy: float | None  # top-1 in percent, where it was measured
    macs: int


def bench(
    models: Sequence[str],
    *,
    tokens: Sequence[int] = (),
    baselines: Sequence[str] = (),
    runtimes: Sequence[Runtime] = ("eager",),
    against: Sequence[str] = (),
    batch_sizes: Sequence[int] = (1,),
    weights: str | Path | None = None,
    prior: str | None = None,
    scale: Scale | None = None,
    device: str = "cpu",
    threads: int = 1,
    rounds: int = 31,
) -> list[dict[str, Any]]:
    """One row per batch size, runtime, model, method and budget.

    Args:
        tokens: budgets; by default an eighth, a quarter, half and all of the patch grid.
        baselines: names in BASELINES; the plain ViT is always there.
        against: other timm models, as NAME or NAME=TOP1.
        weights: a file with the timm model's weights. Without it weights are random, which are as fast as any.

    Columns: model, runtime, method, batch, tokens, accuracy, GMACs, MAC ratio, ms per image with its quartiles ms low
    and ms high, speed-up over the plain ViT in the same runtime with its quartiles low and high, and over fastest
    dense, the plain ViT in the runtime in which it is fastest.
    """
    if not models:
        raise InputError("name at least one model, for example spot bench vit-ti")
    if rounds < 1 or min(batch_sizes) < 1:
        raise InputError("timing needs at least one round and batches of at least one image")
    if "onnx" in runtimes:
        require_onnx()
    if device != "cpu" and set(runtimes) != {"eager"}:
        raise InputError(f"only eager is timed on {device}; other runtimes are timed on the CPU")
    entries = [
        entry
        for name in dict.fromkeys(models)
        for entry in candidates(name, opened(name, device, weights, scale), tokens, baselines, prior)
    ]
    shapes = {image_shape(entry.module) for entry in entries}
    if len(shapes) > 1:
        sizes = " and ".join(" × ".join(map(str, each)) for each in sorted(shapes))
        raise InputError(f"these models were built for images of different sizes, {sizes}; time them one by one")
    (shape,) = shapes
    entries += [rival(each, device) for each in against]
    rows = []
    clock: Literal["wall", "processor"] = "processor" if threads == 1 and device == "cpu" else "wall"
    with TemporaryDirectory() as folder, many_graphs(), cpu_threads(threads), torch.no_grad():
        calls = {}
        for number, entry in enumerate(entries):
            for runtime in runtimes:
                call = call_of(entry, runtime, Path(folder) / f"{number}.onnx", shape, threads)
                if call is not None:
                    calls[runtime, number] = call
        for batch in dict.fromkeys(batch_sizes):
            images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)).to(device)
            for call in calls.values():
                for _ in range(3):  # to warm up
                    call(images)
            seconds = interleaved(calls, images, rounds, clock)
            rows += table_rows(entries, seconds, batch)
    return rows


def opened(name: str, device: str, weights: str | Path | None, scale: Scale | None) -> Source:
    """A model or family on a device. Without weights those that would need a download are random."""
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the device {device!r} cannot be used here: {reason}") from None
    needs = name in ALIASES or timm.is_model(name.removeprefix("timm/").split(".")[0])
    if weights is None and needs and not Path(name).exists():
        return load(name, pretrained=False, scale=scale).to(device)
    source = load_source(name, weights=weights, scale=scale)
    return source.to(device).eval() if isinstance(source, SpotViT) else source


def candidates(
    name: str, source: Source, tokens: Sequence[int], baselines: Sequence[str], prior: str | None
) -> list[Timed]:
    """The plain ViT, then SPoT and each baseline at each budget."""
    dense = dense_model(source)
    cells, known = len(dense.grid()), accuracies(name)
    budgets = list(dict.fromkeys(tokens)) or sorted({-(-cells // part) for part in (8, 4, 2, 1)})
    made: list[tuple[str, int, TokenModel]] = [(PLAIN, cells, PlainViT(dense))]
    others = [BASELINES[each] for each in baselines if each != PLAIN]
    for budget in budgets:
        made.append(("spot", budget, at_budget(source, budget, prior=prior)))
        made += [(each.name, budget, each.build(source, budget)) for each in others if not each.dense]
    return [
        Timed(name, method, budget, module.eval(), known.get((method, budget)), macs(module))
        for method, budget, module in made
    ]


def accuracies(name: str) -> dict[tuple[str, int], float]:
    """Top-1 of a shipped model, by method and tokens, as its card has it."""
    for row in list_models():
        if name in (row["name"], row["alias"]):
            found = row["accuracy"]
            known = {("spot", tokens): top1 for tokens, top1 in found.items()}
            known |= {("merged", tokens): top1 for tokens, top1 in row["merged"].items()}
            return known | {(PLAIN, tokens): found[tokens] for tokens in (max(found, default=0),) if found}
    return {}


def rival(text: str, device: str) -> Timed:
    """Another timm model with random weights and images of its own size, from NAME or NAME=TOP1."""
    name, _, top1 = text.partition("=")
    if not timm.is_model(name.split(".")[0]):
        raise unknown("timm model", name, timm.list_models())
    try:
        accuracy = float(top1) if top1 else None
    except ValueError:
        raise InputError(f"a model to compare with is NAME or NAME=TOP1, in percent, got {text!r}") from None
    module = timm.create_model(name.split(".")[0]).to(device).eval()
    return Timed(name, "timm", None, module, accuracy, macs(module, own_shape(module)))


def own_shape(module: Any) -> tuple[int, ...]:
    """(C, H, W) of the images that a timm model was built for."""
    return tuple(module.default_cfg["input_size"])


def call_of(
    entry: Timed, runtime: Runtime, path: Path, shape: tuple[int, ...], threads: int
) -> Callable[[Tensor], Any] | None:
    """A function of images; an ONNX file has images of its own, as bytes. None where it cannot be exported."""
    if entry.method == "timm":
        own = own_shape(entry.module)
        run = timm_session(entry.module, path, own, threads) if runtime == "onnx" else entry.module
        run = torch.compile(run, dynamic=False) if runtime == "compile" else run
        made = lru_cache(lambda batch, device: torch.randn(batch, *own, device=device))
        return lambda images: run(made(len(images), images.device))
    if runtime != "onnx":
        called: Any = entry.module.model.vit if isinstance(entry.module, PlainViT) else entry.module
        return torch.compile(called, dynamic=False) if runtime == "compile" else called
    module, height, width = entry.module, *shape[1:]
    if isinstance(module, SpotViT):
        export(module, path, prior=module.prior, tokens=module.tokens)
    elif isinstance(module, (ToMe, PlainViT)):
        export(module, path)
    else:
        report.warn(f"{entry.method} draws its tokens and has no file; it is timed in other runtimes alone")
        return None
    session = Exported(path, threads=threads).session

    @lru_cache
    def pixels(batch: int) -> Any:
        return np.random.default_rng(0).integers(0, 256, (batch, height, width, 3), np.uint8)

    return lambda images: session.run(None, {"images": pixels(len(images))})


def timm_session(module: nn.Module, path: Path, shape: tuple[int, ...], threads: int) -> Callable[[Tensor], Any]:
    """A timm model as torch's exporter writes it, called with normalised images."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = torch.export.Dim("batch", min=1, max=1024)
        program = torch.onnx.export(
            module, (torch.randn(2, *shape),), dynamo=True, verbose=False, input_names=["images"],
            dynamic_shapes=({0: batch},),
        )  # fmt: skip
    assert program is not None
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images.numpy()})


def table_rows(
    entries: Sequence[Timed], seconds: Mapping[tuple[Runtime, int], Sequence[float]], batch: int
) -> list[dict[str, Any]]:
    """Rows with the time per image, and the speed-up over the first model's plain ViT."""
    dense = {runtime: times for (runtime, number), times in seconds.items() if number == 0}
    fastest = min(dense.values(), key=median)
    rows = []
    for (runtime, number), times in seconds.items():
        entry = entries[number]
        low, speedup, high = ratios(dense[runtime], times)
        ms = [1000 * each / batch for each in times]
        rows.append(
            {
                "model": entry.model,
                "runtime": runtime,
                "method": entry.method,
                "batch": batch,
                "tokens": entry.tokens,
                "accuracy": entry.accuracy,
                "GMACs": entry.macs / 1e9,
                "MAC ratio": entries[0].macs / entry.macs,
                "ms": median(ms),
                "ms low": quartiles(ms)[0],
                "ms high": quartiles(ms)[2],
                "speed-up": speedup,
                "low": low,
                "high": high,
                "over fastest dense": ratios(fastest, times)[1],
            }
        )
    return rows


def ratios(dense: Sequence[float], times: Sequence[float]) -> tuple[float, float, float]:
    """Quartiles of the paired ratios."""
    return quartiles([a / b for a, b in zip(dense, times, strict=True)])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, middle, high


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as a person reads them."""
    return [
        {
            **{name: row[name] for name in ("model", "runtime", "method", "batch", "tokens")},
            "top-1": "" if row["accuracy"] is None else f"{row['accuracy']:.1f}",
            "GMACs": f"{row['GMACs']:.3f}",
            "ms": f"{row['ms']:.2f} ({row['ms low']:.2f} to {row['ms high']:.2f})",
            "times as fast": f"{row['speed-up']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
            "by MACs": f"{row['MAC ratio']:.2f}",
            "over fastest dense": f"{row['over fastest dense']:.2f}",
        }
        for row in rows
    ]
