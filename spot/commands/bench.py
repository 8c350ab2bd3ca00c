"""spot bench: how fast models and baselines are, beside what their multiply-adds promise."""

from pathlib import Path
from typing import Literal

from spot.commands import options


def bench(
    models: options.ModelArguments,
    /,
    tokens: tuple[int, ...] = (),
    batch_size: tuple[int, ...] = (1, 32),
    baseline: tuple[options.Baseline, ...] = ("plain", "patch-dropout", "tome-cost"),
    prior: options.Prior = None,
    scale: options.Scale = None,
    rounds: int = 11,
    compiled: bool = False,
    bf16: bool = False,
    device: str | None = None,
    threads: int | None = None,
    processor_time: bool = False,
    runtime: tuple[Literal["eager", "compile", "onnx", "onnx-int8"], ...] = (),
    weights: options.Weights = None,
    calibrate: Path | None = None,
    json: options.Json = None,
    plot: Path | None = None,
) -> None:
    """Time models in turns in one process, and compare with the ratio of their multiply-adds.

    Every row's speed-up and MAC ratio are relative to the first row's model. A spread beyond a few
    percent says that the machine was busy; ratios survive that better than images per second do.
    Weights do not change the time: a timm model is built without downloading any.

    Args:
        tokens: budgets; by default an eighth, a quarter, half and all of the patch grid.
        batch_size: images at a time, each size measured.
        baseline: plain is the timm model itself, patch-dropout keeps as many patches, tome merges until
            as many tokens are left, tome-cost until its blocks cost as much, merged places more windows and merges
            them at that cost, elastic shifts, rescales and drops patches.
        rounds: how often each model is timed.
        compiled: through torch.compile, which takes a while for every model.
        bf16: in bfloat16, where the device calculates in it.
        device: cpu, cuda, cuda:1, mps; by default the GPU if there is one.
        threads: CPU threads.
        processor_time: count the processor time of one CPU thread instead of the wall clock's; on a
            machine that others use too, this is far steadier. Goes with --threads 1.
        runtime: compare these, each with the plain ViT and SPoT at every budget, by processor time on one and
            two threads (or --threads); onnx files are exported first.
        calibrate: a folder of pictures for onnx-int8; by default built-in scenes.
        plot: draw measured speed-up against MAC ratio.

    example: spot bench vit_small_patch16_224 --tokens 25 49 100 --batch-size 1 64
    """
    if runtime:
        from spot.export.bench import bench_command

        bench_command(models, runtime, tokens, batch_size, weights, calibrate, rounds, threads, json)
        return
    import torch

    from spot import report
    from spot.errors import InputError
    from spot.evaluation.throughput import bench, explained, table
    from spot.plots import check_ending, save
    from spot.plots.accuracy import throughput

    if not models:
        raise InputError("name at least one model, for example spot bench vit_small_patch16_224")
    check_ending(plot)
    report.check_outputs(json, plot)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    batches = list(dict.fromkeys(batch_size))
    how = {"compiled": compiled, "precision": "bfloat16" if bf16 else "float32", "rounds": rounds}
    how["clock"] = "processor" if processor_time else "wall"
    rows = bench(
        models, tokens=tokens, baselines=baseline, prior=prior, scale=scale, device=device, threads=threads,
        batch_sizes=batches, **how,
    )  # fmt: skip
    title = f"{', '.join(dict.fromkeys(models))} ({'compiled' if compiled else 'eager'}, {how['precision']}, {device})"
    for batch in batches:
        report.show(table([row for row in rows if row["batch"] == batch]), f"{title}, batch {batch}")
    report.say(explained(rows))
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    about = {"command": report.command(), "device": name}
    report.save_json(json, rows, {**about, "threads": threads or torch.get_num_threads(), **how})
    if plot is not None:
        several = len(set(models)) > 1
        named = [{**row, "method": f"{row['name']} {row['method']}"} if several else row for row in rows]
        save(throughput(named, title=title), plot)
        report.say(f"The figure is in {plot}.")
