"""Runtimes timed in turns: how much less time fewer tokens take, where the model is deployed.

In every runtime the plain ViT and SPoT at each budget run in turns on one image, positions given.
Times are of the processor, summed over threads, because other programs disturb them least; a speed-up
is the median over rounds of the dense time by the other, beside the ratio of multiply-adds. Two dense
times matter: the one in the same runtime, and the fastest in any.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spot import report
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.evaluation.throughput import cpu_threads, interleaved, many_graphs
from spot.export.files import describe, require_onnx, write_onnx
from spot.export.graph import DenseGraph, Graph
from spot.export.int8 import Range, plan, quantise
from spot.export.runtime import Exported
from spot.export.verify import noise, normalised, sample_pictures
from spot.models.baselines import BASELINES
from spot.models.checkpoints import load
from spot.models.protocol import Placed
from spot.models.spot_vit import SpotViT

Runtime = Literal["eager", "compile", "onnx", "onnx-int8"]
Call = Callable[[Tensor], Any]
DENSE = 0  # stands for the plain ViT where a budget would


def bench_runtimes(
    model: SpotViT,
    runtimes: Sequence[Runtime],
    *,
    tokens: Sequence[int] = (25, 49, 100, 196),
    batch: int = 1,
    counts: Sequence[int] = (1, 2),
    rounds: int = 21,
    pictures: Sequence[NDArray[np.uint8]] = (),
) -> list[dict[str, Any]]:
    """One row per runtime, number of threads and budget; the plain ViT is the row `plain`.

    Args:
        counts: of threads.
        pictures: (H, W, 3) to calibrate int8 with; by default built-in scenes.
    """
    if rounds < 1 or batch < 1:
        raise InputError("timing needs at least one round and batches of at least one image")
    if any(name.startswith("onnx") for name in runtimes):
        require_onnx()
    budgets = [DENSE, *tokens]
    cost = {DENSE: macs(BASELINES["plain"].build(model))}
    cost |= {budget: macs(Placed(model, budget, "isotropic")) for budget in tokens}
    images = torch.randn(batch, 3, *model.img_size, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder, many_graphs():
        files = written(model, runtimes, Path(folder), pictures or sample_pictures(model, count=16))
        for count in counts:
            with cpu_threads(count), torch.no_grad():
                calls = {
                    (runtime, budget): call_of(model, runtime, budget, batch, files, count)
                    for runtime in runtimes
                    for budget in budgets
                }
                for call in calls.values():
                    for _ in range(2):  # to warm up
                        call(images)
                seconds = interleaved(calls, images, rounds, "processor")
            rows += table_rows(seconds, cost, count, batch)
    return rows


def written(
    model: SpotViT, runtimes: Sequence[Runtime], folder: Path, pictures: Sequence[NDArray[np.uint8]]
) -> dict[tuple[str, bool], Path]:
    """The files that the runtimes need, by runtime and whether the plain ViT."""
    files: dict[tuple[str, bool], Path] = {}
    for runtime in ("onnx", "onnx-int8"):
        if runtime not in runtimes:
            continue
        ready, ranges = model, dict[str, Range]()
        sizes = model.scale not in (None, 1)
        about = describe(model, Graph(model, sizes=sizes))
        if runtime == "onnx-int8":
            ready = copy.deepcopy(model)
            ranges, _ = plan(ready, normalised(about, torch.from_numpy(np.stack(pictures))))
        write_onnx(Graph(ready, attention_node=True, sizes=sizes), about, folder / f"{runtime}.onnx")
        images = (noise(about, 2, about["img_size"]),)
        free = ({0: torch.export.Dim("batch", min=1, max=1024)},)
        write_onnx(DenseGraph(ready), about, folder / f"{runtime}-dense.onnx", inputs=images, free=free)
        files |= {(runtime, False): folder / f"{runtime}.onnx", (runtime, True): folder / f"{runtime}-dense.onnx"}
        if ranges:
            for dense in (False, True):
                quantise(files[runtime, dense], ranges)
    return files


def call_of(
    model: SpotViT, runtime: Runtime, budget: int, batch: int, files: Mapping[tuple[str, bool], Path], count: int
) -> Call:
    """A function of images with its positions in place; an ONNX file has images of its own."""
    blank = torch.zeros(batch, 3, *model.img_size)
    positions = None if budget == DENSE else model.place(blank, tokens=budget, prior="isotropic")
    if runtime in ("onnx", "onnx-int8"):
        exported = Exported(files[runtime, budget == DENSE], threads=count)
        inputs = {"images": np.random.default_rng(0).integers(0, 256, (batch, *model.img_size, 3), np.uint8)}
        if positions is not None:
            inputs["positions"] = exported.checked_positions(positions.numpy(), inputs["images"])
        return lambda images: exported.session.run(None, inputs)
    module: Any = model.vit if positions is None else model
    if runtime == "compile":
        module = torch.compile(module, dynamic=False)
    return module if positions is None else (lambda images: module(images, positions))


def table_rows(
    seconds: Mapping[tuple[Runtime, int], Sequence[float]], cost: Mapping[int, float], count: int, batch: int
) -> list[dict[str, Any]]:
    """Rows with the time per image, and the speed-up over the plain ViT in the same runtime and in the fastest."""
    dense = {runtime: times for (runtime, budget), times in seconds.items() if budget == DENSE}
    fastest = min(dense.values(), key=median)
    return [
        {
            "runtime": runtime,
            "threads": count,
            "method": "plain" if budget == DENSE else "spot",
            "tokens": None if budget == DENSE else budget,
            "ms": 1000 * median(times) / batch,
            "speed-up": ratio(dense[runtime], times),
            "over fastest dense": ratio(fastest, times),
            "MAC ratio": cost[DENSE] / cost[budget],
        }
        for (runtime, budget), times in seconds.items()
    ]


def ratio(dense: Sequence[float], times: Sequence[float]) -> float:
    return median(a / b for a, b in zip(dense, times, strict=True))


def bench_command(
    models: Sequence[str],
    runtimes: Sequence[Runtime],
    tokens: Sequence[int],
    batches: Sequence[int],
    weights: Path | None,
    calibrate: Path | None,
    rounds: int,
    count: int | None,
    json: Path | None,
) -> None:
    """What `spot bench --runtime` does: time, show, and write."""
    report.check_outputs(json)
    if len(models) != 1:
        raise InputError(f"runtimes are compared for one model at a time, got {len(models)}")
    model = load(models[0], weights=weights)
    model = model.suited(len(model.grid()) // 4)
    pictures = sample_pictures(model, calibrate, 64)
    rows = []
    for batch in dict.fromkeys(batches):
        made = bench_runtimes(
            model,
            runtimes,
            tokens=tokens or (25, 49, 100, 196),
            batch=batch,
            counts=(1, 2) if count is None else (count,),
            rounds=rounds,
            pictures=pictures,
        )
        report.show(made, f"{models[0]}, batch {batch}, processor time")
        rows += [{"batch": batch, **row} for row in made]
    report.say(
        "ms is processor time per image, summed over threads. speed-up is over the plain ViT in the same runtime, "
        "over fastest dense over the plain ViT in the runtime that is fastest for it; medians over rounds in turns."
    )
    report.save_json(json, rows, {"command": report.command(), "rounds": rounds})
