"""A cascade and the plain ViT timed in turns on photographs: how much time early exit saves.

A cascade's time depends on the images: an easy one stops at the first stage, a hard one runs all of them. So each round
takes other photographs, both methods get the same ones, and the time is the mean of a round. In ONNX Runtime the
cascade is the folder that `spot export --cascade` writes, run by ExportedCascade. Decoding and resizing are not timed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spot.data.files import image_files
from spot.data.picture import open_image
from spot.errors import InputError
from spot.evaluation.cost import macs
from spot.evaluation.early_exit import ROUNDS, Candidates
from spot.evaluation.throughput import CLOCKS, Clock, cpu_threads, interleaved
from spot.export.bench import PLAIN, Timed, accuracies, ratios, table_rows
from spot.export.files import export, export_cascade, export_stage, require_onnx
from spot.export.runtime import Exported, ExportedCascade, fit_picture
from spot.export.verify import normalised
from spot.models.cascade import Cascade
from spot.models.family import dense_model
from spot.models.loading import load_source
from spot.models.wrappers import PlainViT

CASCADE = "cascade"
LEAST = 16  # photographs of a round, in batches

Run = Callable[[Any], NDArray[np.int64] | None]  # images of a batch → of a cascade, how many stages each took


def bench_cascade(
    name: str,
    folder: Path,
    *,
    file: Path | None = None,
    runtimes: Sequence[Literal["eager", "onnx"]] = ("eager",),
    batch_sizes: Sequence[int] = (1,),
    weights: str | Path | None = None,
    threads: int = 1,
    rounds: int = 31,
) -> list[dict[str, Any]]:
    """Two rows per batch size and runtime, the plain ViT and the cascade, with the columns of spot.export.bench.

    Args:
        folder: photographs. A round takes the next 16 of them, or a batch if that is more, in a random order.
        file: a cascade that `spot calibrate` wrote, instead of the shipped one.

    Further columns: time, the median share of the plain ViT's time, with its quartiles time low and time high; mean
    time, the share of all rounds together; photographs, how many were timed; stages, the share that ran each stage.
    """
    if rounds < 1 or min(batch_sizes) < 1:
        raise InputError("timing needs at least one round and batches of at least one image")
    if "onnx" in runtimes:
        require_onnx()
    files = image_files(folder)
    if not files:
        raise InputError(f"photographs were expected in {folder}, and there are none")
    source = load_source(name, weights=weights)
    cascade = Cascade.load(name if file is None else file, source)
    dense = dense_model(source).cpu().eval()
    cells = len(dense.grid())
    plain = Timed(name, PLAIN, cells, None, accuracies(name).get((PLAIN, cells)), macs(PlainViT(dense)))
    clock: Clock = "processor" if threads == 1 else "wall"
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    rows = []
    with TemporaryDirectory() as scratch, cpu_threads(threads), torch.no_grad():
        calls = {
            (runtime, number): run
            for runtime in runtimes
            for number, run in enumerate(runs(dense, cascade, runtime, Path(scratch), threads))
        }
        for batch in dict.fromkeys(batch_sizes):
            count = max(LEAST, batch)
            seconds: dict[tuple[Any, int], list[float]] = {key: [] for key in calls}
            taken: list[int] = []
            for turn in range(-1, rounds):  # the first one warms up
                chosen = [files[order[(turn * count + each) % len(order)]] for each in range(count)]
                bytes_ = np.stack([np.asarray(fit_picture(open_image(path), dense.img_size)) for path in chosen])
                given: dict[str, Any] = {"onnx": bytes_, "eager": tensors(dense.data_config, bytes_)}
                keys = [*calls][turn % len(calls) :] + [*calls][: turn % len(calls)]
                for runtime, number in keys:
                    now, spent = CLOCKS[clock], 0.0
                    for start in range(0, count, batch):
                        part = given[runtime][start : start + batch]
                        begin = now()
                        stages = calls[runtime, number](part)
                        spent += now() - begin
                        if stages is not None and turn >= 0 and runtime == runtimes[0]:
                            taken += stages.tolist()
                    if turn >= 0:
                        seconds[runtime, number].append(spent / count * batch)
            shares = [mean(each > stage for each in taken) for stage in range(len(cascade.stages))]
            cost = sum(share * stage.macs for share, stage in zip(shares, cascade.stages, strict=True))
            entries = [plain, Timed(name, CASCADE, None, None, None, round(cost))]
            made = table_rows(entries, seconds, batch)
            for row, ((runtime, number), times) in zip(made, seconds.items(), strict=True):
                low, middle, high = ratios(times, seconds[runtime, 0])
                of_all = sum(times) / sum(seconds[runtime, 0])
                row |= {"time": middle, "time low": low, "time high": high, "mean time": of_all}
                rows.append(
                    row | {"photographs": min(rounds * count, len(files)), "stages": shares if number else [1.0]}
                )
    return rows


def runs(dense: Any, cascade: Cascade, runtime: str, folder: Path, threads: int) -> tuple[Run, Run]:
    """The plain ViT and the cascade as functions of a batch."""
    if runtime == "eager":

        def staged(images: Tensor) -> NDArray[np.int64]:
            taken = torch.zeros(len(images), dtype=torch.int64)
            for step in cascade(images):
                taken[step.rows] += 1
            return taken.numpy()

        return nothing_of(dense.vit), staged
    export(PlainViT(dense), folder / "plain.onnx")
    export_cascade(cascade, folder / CASCADE)
    whole, stopping = Exported(folder / "plain.onnx", threads), ExportedCascade(folder / CASCADE, threads)
    return nothing_of(whole), lambda images: stopping(images)["stages"]


def nothing_of(call: Callable[[Any], Any]) -> Run:
    """The plain ViT has no stages to count."""

    def run(images: Any) -> None:
        call(images)

    return run


def tensors(config: dict[str, Any], images: NDArray[np.uint8]) -> Tensor:
    """Bytes (B, H, W, 3) as the model takes them (B, 3, H, W)."""
    return normalised({"preprocessing": config}, torch.from_numpy(images)).contiguous()


def onnx_stage_seconds(candidates: Candidates) -> dict[tuple[Any, ...], float]:
    """As spot.evaluation.early_exit.stage_seconds, in ONNX Runtime on one thread: each stage is exported first."""
    require_onnx()
    shape = candidates.models[0].spot_vit.img_size
    pixels = np.random.default_rng(0).integers(0, 256, (1, *shape, 3), np.uint8)
    cells, calls = candidates.stages[-1].tokens, {}
    with TemporaryDirectory() as folder:
        for number, (stage, model) in enumerate(zip(candidates.stages, candidates.models, strict=True)):
            path = Path(folder) / f"{number}.onnx"
            export_stage(model, path, last=stage.tokens == cells)
            session = Exported(path, threads=1)
            calls[stage.tokens, stage.merged] = lambda _, session=session: session(pixels)
        nothing = torch.empty(0)
        interleaved(calls, nothing, 2)  # to warm up
        return {key: median(seconds) for key, seconds in interleaved(calls, nothing, ROUNDS, "processor").items()}


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as a person reads them."""
    return [
        {
            **{name: row[name] for name in ("model", "runtime", "method", "batch")},
            "ms": f"{row['ms']:.2f} ({row['ms low']:.2f} to {row['ms high']:.2f})",
            "of the time": f"{row['time']:.2f} ({row['time low']:.2f} to {row['time high']:.2f})",
            "of all rounds": f"{row['mean time']:.2f}",
            "of the MACs": f"{1 / row['MAC ratio']:.2f}",
            "ran each stage": ", ".join(f"{share:.0%}" for share in row["stages"]),
        }
        for row in rows
    ]
