"""Latency and accuracy of models, budgets, cascades and runtimes, with timings interleaved.

In every runtime the plain ViT and each method at each budget take turns on the same images. On one CPU thread,
processor time is measured, because it is least affected by other programs; otherwise wall time. A speed-up is the
median over rounds of the dense time divided by the method's time; its quartiles show how stable it was.

A cascade's time depends on the images: easy ones stop at the first stage, hard ones run all of them. If there is a
cascade, each round takes other photographs, the same for all methods. Decoding and resizing are not timed.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor

from spot import report
from spot.data.folders import photo_files
from spot.data.picture import open_image, resize_and_crop
from spot.errors import InputError, unknown
from spot.evaluation.cost import image_shape, macs
from spot.evaluation.throughput import Clock, cpu_threads, interleaved
from spot.export.files import MAX_BATCH, export, export_cascade
from spot.export.graph import ExportedModel, normalise_pixels
from spot.export.runtime import ExportedCascade, onnx_session
from spot.models.baselines import BASELINES
from spot.models.cascade import Cascade
from spot.models.family import Source, at_budget, dense_model
from spot.models.loading import load, load_source
from spot.models.shipped import ALIASES, list_models
from spot.models.spot_vit import SpotViT
from spot.models.wrappers import PlainViT, TokenModel
from spot.placement.sizes import Scale

Runtime = Literal["eager", "compile", "onnx"]
PLAIN, CASCADE = "plain", "cascade"
MIN_PHOTOGRAPHS = 16  # per round
WARM_UP = 3  # rounds


@dataclass(frozen=True)
class Timed:
    """One row of the table: the model to time, and its known accuracy and cost."""

    model: str
    method: str
    tokens: int | None
    module: Any  # a TokenModel, a Cascade, or a timm model
    accuracy: float | None  # top-1 in percent, if measured
    macs: int
    stages: Sequence[float] = ()  # for a cascade: the share of photographs that ran each stage


class ImageBatch(NamedTuple):
    """A batch of images, in the formats of eager models and of exported files."""

    images: Tensor  # (B, C, H, W), normalised
    pixels: NDArray[np.uint8]  # (B, H, W, 3)

    @property
    def device(self) -> torch.device:
        return self.images.device


Call = Callable[[ImageBatch], Any]


def bench(
    models: Sequence[str],
    *,
    tokens: Sequence[int] = (),
    baselines: Sequence[str] = (),
    runtimes: Sequence[Runtime] = ("eager",),
    against: Sequence[str] = (),
    batch_sizes: Sequence[int] = (1,),
    photographs: Path | None = None,
    cascade: Path | None = None,
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
        baselines: names in BASELINES; the plain ViT is always included.
        against: other timm models, as NAME or NAME=TOP1.
        photographs: a folder; adds a row for the model's cascade, and then only the budgets in `tokens` are timed. A
            round takes the next 16 photographs, or a batch if that is more, in a random order. Without it images are
            noise, which takes the same time.
        cascade: a file that `spot calibrate` wrote, instead of the shipped one.
        weights: a file with the timm model's weights. Without it weights are random, which takes the same time.

    Columns: model, runtime, method, batch, tokens, accuracy, GMACs and MAC ratio; ms per image with its quartiles ms
    low and ms high; speed-up over the plain ViT in the same runtime with its quartiles low and high; over fastest
    dense, the speed-up over the plain ViT in its fastest runtime; stages, the share of photographs that ran each.
    """
    if not models:
        raise InputError("name at least one model, for example spot bench vit-ti")
    if rounds < 1 or min(batch_sizes) < 1:
        raise InputError("timing needs at least one round and batches of at least one image")
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the device {device!r} cannot be used here: {reason}") from None
    if device != "cpu" and set(runtimes) != {"eager"}:
        raise InputError(f"only eager is timed on {device}; other runtimes are timed on the CPU")
    if photographs is None and cascade is not None:
        raise InputError("--cascade goes with --early-exit FOLDER: its time depends on the photographs")
    if photographs is not None and (len(models) != 1 or "compile" in runtimes or device != "cpu"):
        raise InputError("early exit is timed for one model, in eager PyTorch and ONNX Runtime on the CPU")
    files = [] if photographs is None else photo_files([photographs])
    entries: list[Timed] = []
    for name in dict.fromkeys(models):
        source = open_source(name, weights, scale, real_weights=bool(files))
        entries += methods(name, source, tokens, baselines, prior, parts_of_grid=not files)
        if files:
            early_exit = Cascade.load(name if cascade is None else cascade, source)
            top1 = None if cascade is not None else shipped_accuracies(name).get((CASCADE, None))
            entries.append(Timed(name, CASCADE, None, early_exit, top1, 0))
    shapes = {image_shape(entry.module) for entry in entries if entry.method != CASCADE}
    if len(shapes) > 1:
        sizes = " and ".join(" × ".join(map(str, shape)) for shape in sorted(shapes))
        raise InputError(f"these models were built for images of different sizes, {sizes}; time them one by one")
    (shape,) = shapes
    model = entries[0].module.spot_vit
    entries += [timm_model(each) for each in against]
    for entry in entries:
        entry.module.to(device).eval()
    rows = []
    clock: Clock = "processor" if threads == 1 and device == "cpu" else "wall"
    # By default torch.compile falls back to eager after eight graphs; here every model has one.
    many_graphs = torch._dynamo.config.patch(recompile_limit=1000)
    with many_graphs, cpu_threads(threads), torch.no_grad():
        calls: dict[tuple[Runtime, int], Call] = {}
        stage_counts: list[int] = []  # for every photograph that the cascade processed
        for number, entry in enumerate(entries):
            for runtime in runtimes:
                if (call := call_of(entry, runtime, threads, stage_counts)) is not None:
                    calls[runtime, number] = call
        for batch in dict.fromkeys(batch_sizes):
            images = photograph_batches(files, batch, model) if files else noise_batches(batch, shape, device)
            interleaved(calls, images, WARM_UP, clock)
            stage_counts.clear()
            seconds = interleaved(calls, images, rounds, clock)
            rows += table_rows([with_stages(entry, stage_counts) for entry in entries], seconds, batch)
    return rows


def noise_batches(batch: int, shape: tuple[int, ...], device: str) -> Callable[[int], list[ImageBatch]]:
    """A function that returns the same batch in every round."""
    images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    pixels = np.random.default_rng(0).integers(0, 256, (batch, *shape[1:], 3), np.uint8)
    return lambda number: [ImageBatch(images, pixels)]


def photograph_batches(files: Sequence[Path], batch: int, model: SpotViT) -> Callable[[int], list[ImageBatch]]:
    """A function that returns the next photographs in every round, in a random order."""
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    count = -(-MIN_PHOTOGRAPHS // batch) * batch

    def batches(number: int) -> list[ImageBatch]:
        chosen = [files[order[(number * count + index) % len(files)]] for index in range(count)]
        pixels = np.stack([np.asarray(resize_and_crop(open_image(path), model.img_size)) for path in chosen])
        images = normalise_pixels(torch.from_numpy(pixels), model.data_config).contiguous()
        return [ImageBatch(images[at : at + batch], pixels[at : at + batch]) for at in range(0, count, batch)]

    return batches


def with_stages(entry: Timed, stage_counts: Sequence[int]) -> Timed:
    """A cascade with its measured share of photographs per stage, and its mean cost."""
    if entry.method != CASCADE:
        return entry
    stages = entry.module.stages
    shares = [mean(count > number for count in stage_counts) for number in range(len(stages))]
    cost = sum(share * stage.macs for share, stage in zip(shares, stages, strict=True))
    return replace(entry, macs=round(cost), stages=shares)


def open_source(name: str, weights: str | Path | None, scale: Scale | None, *, real_weights: bool) -> Source:
    """A model or family. Weights that need a download are random, unless they are given or needed."""
    download = name in ALIASES or timm.is_model(name.removeprefix("timm/"))
    if weights is None and download and not real_weights and not Path(name).exists():
        return load(name, pretrained=False, scale=scale)
    return load_source(name, weights=weights, scale=scale)


def methods(
    name: str,
    source: Source,
    tokens: Sequence[int],
    baselines: Sequence[str],
    prior: str | None,
    *,
    parts_of_grid: bool,
) -> list[Timed]:
    """The plain ViT, then SPoT and each baseline at each budget; without budgets, optionally at parts of the grid."""
    dense = dense_model(source)
    cells, top1 = len(dense.grid()), shipped_accuracies(name)
    budgets = list(dict.fromkeys(tokens))
    if not budgets and parts_of_grid:
        budgets = sorted({-(-cells // part) for part in (8, 4, 2, 1)})
    models: list[tuple[str, int, TokenModel]] = [(PLAIN, cells, PlainViT(dense))]
    others = [BASELINES[each] for each in baselines if not BASELINES[each].dense]
    for budget in budgets:
        models.append(("spot", budget, at_budget(source, budget, prior=prior)))
        models += [(each.name, budget, each.build(source, budget)) for each in others]
    return [
        Timed(name, method, budget, model, top1.get((method, budget)), macs(model)) for method, budget, model in models
    ]


def shipped_accuracies(name: str) -> dict[tuple[str, int | None], float | None]:
    """Top-1 of a shipped model, by method and tokens, from the list of models."""
    row = next((row for row in list_models() if name in (row["name"], row["alias"])), None)
    if row is None or not row["accuracy"]:
        return {}
    cells = max(row["accuracy"])
    found = {(PLAIN, cells): row["accuracy"][cells], (CASCADE, None): row["cascade"]}
    for method, column in (("spot", "accuracy"), ("merged", "merged")):
        found |= {(method, tokens): top1 for tokens, top1 in row[column].items()}
    return found


def timm_model(text: str) -> Timed:
    """Another timm model with random weights and its own image size, from NAME or NAME=TOP1."""
    name, _, top1 = text.partition("=")
    if not timm.is_model(name):
        raise unknown("timm model", name, timm.list_models())
    try:
        accuracy = float(top1) if top1 else None
    except ValueError:
        raise InputError(f"a model to compare with is NAME or NAME=TOP1, in percent, got {text!r}") from None
    module = timm.create_model(name.split(".")[0])
    return Timed(name, "timm", None, module, accuracy, macs(module, module.default_cfg["input_size"]))


def call_of(entry: Timed, runtime: Runtime, threads: int, stage_counts: list[int]) -> Call | None:
    """A function of a batch, or None if the model cannot be exported. A cascade appends to `stage_counts`."""
    model = entry.module
    if entry.method == "timm":
        return timm_call(model, runtime, threads)
    if isinstance(model, Cascade) and runtime == "onnx":
        with TemporaryDirectory() as folder:
            export_cascade(model, folder)
            exported = ExportedCascade(folder, threads)
        return lambda batch: stage_counts.extend(exported(batch.pixels)["stages"].tolist())
    if isinstance(model, Cascade):
        return lambda batch: stage_counts.extend(stages_run(model, batch.images))
    if runtime != "onnx":
        run = compiled(model.model.vit if isinstance(model, PlainViT) else model, runtime)
        return lambda batch: run(batch.images)
    if not isinstance(model, ExportedModel):
        report.warn(f"{entry.method} draws its tokens and has no file; it is timed in other runtimes alone")
        return None
    session = exported_session(model, threads)
    return lambda batch: session.run(None, {"images": batch.pixels})


def stages_run(cascade: Cascade, images: Tensor) -> list[int]:
    """The number of stages that each image runs."""
    return torch.cat([step.rows for step in cascade(images)]).bincount().tolist()


def timm_call(module: Any, runtime: Runtime, threads: int) -> Call:
    """A timm model as a function of a batch, called with noise of the model's own image size."""
    shape = module.default_cfg["input_size"]
    noise = cache(lambda count, device: torch.randn(count, *shape, device=device))
    if runtime != "onnx":
        run = compiled(module, runtime)
        return lambda batch: run(noise(len(batch.pixels), batch.device))
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            module, (torch.randn(2, *shape),), dynamo=True, verbose=False, input_names=["images"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=MAX_BATCH)},),
        )  # fmt: skip
        program.save(f"{folder}/model.onnx")
        session = onnx_session(f"{folder}/model.onnx", threads)
    return lambda batch: session.run(None, {"images": noise(len(batch.pixels), batch.device).numpy()})


def compiled(module: Any, runtime: Runtime) -> Any:
    """A module as eager PyTorch or torch.compile calls it."""
    return torch.compile(module, dynamic=False) if runtime == "compile" else module


def exported_session(model: ExportedModel, threads: int) -> Any:
    """An ONNX Runtime session of a model with its placement."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export(model, path, built_in=True)
        return onnx_session(path, threads)


def onnx_stage(model: Any, last: bool) -> Callable[[Tensor], Any]:
    """A stage of a cascade in ONNX Runtime on one thread, for `calibrate`. It runs on the same image in every call."""
    _, height, width = image_shape(model)
    pixels = np.random.default_rng(0).integers(0, 256, (1, height, width, 3), np.uint8)
    session = exported_session(model, threads=1)
    return lambda images: session.run(None, {"images": pixels})


def table_rows(
    entries: Sequence[Timed], seconds: Mapping[tuple[Runtime, int], Sequence[float]], batch: int
) -> list[dict[str, Any]]:
    """Rows with the time per image, and the speed-up over the first model's plain ViT. seconds: per batch."""
    dense = {runtime: times for (runtime, number), times in seconds.items() if number == 0}
    fastest = min(dense.values(), key=median)
    rows = []
    for (runtime, number), times in seconds.items():
        entry = entries[number]
        ms_low, ms, ms_high = quartiles(1000 * np.array(times) / batch)
        low, speedup, high = quartiles(np.divide(dense[runtime], times))
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
                "ms": ms,
                "ms low": ms_low,
                "ms high": ms_high,
                "speed-up": speedup,
                "low": low,
                "high": high,
                "over fastest dense": quartiles(np.divide(fastest, times))[1],
                "stages": list(entry.stages),
            }
        )
    return rows


def quartiles(values: NDArray[Any]) -> list[float]:
    return np.quantile(values, (0.25, 0.5, 0.75)).tolist()


def display_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, formatted for display."""
    cascades = any(row["stages"] for row in rows)
    return [
        {
            **{name: row[name] for name in ("model", "runtime", "method", "batch", "tokens")},
            "top-1": "" if row["accuracy"] is None else f"{row['accuracy']:.1f}",
            "GMACs": f"{row['GMACs']:.3f}",
            "ms": f"{row['ms']:.2f} ({row['ms low']:.2f} to {row['ms high']:.2f})",
            "times as fast": f"{row['speed-up']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
            "by MACs": f"{row['MAC ratio']:.2f}",
            "over fastest dense": f"{row['over fastest dense']:.2f}",
            **({"ran each stage": ", ".join(f"{share:.0%}" for share in row["stages"])} if cascades else {}),
        }
        for row in rows
    ]
