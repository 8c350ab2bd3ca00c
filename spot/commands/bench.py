"""spot bench: latency and accuracy of models, baselines and runtimes."""

from pathlib import Path
from typing import Literal

from spot import options, report


def bench(
    models: options.ModelArguments,
    /,
    tokens: options.Several[int] = (),
    batch_size: tuple[int, ...] = (1, 32),
    runtime: tuple[Literal["eager", "compile", "onnx"], ...] = ("eager",),
    baseline: options.Baselines = ("merged",),
    against: options.Several[str] = (),
    early_exit: options.Maybe[Path] = None,
    cascade: options.Maybe[Path] = None,
    weights: options.Weights = None,
    prior: options.Prior = None,
    scale: options.Scale = None,
    rounds: int = 31,
    threads: int = 1,
    device: options.Maybe[str] = None,
    json: options.Json = None,
    plot: options.Maybe[Path] = None,
) -> None:
    """Compare accuracy, multiply-adds, time and speed-up of models, budgets and runtimes, timed in turns.

    The first rows are the plain ViT's; every speed-up is relative to it in the same runtime. Times have
    quartiles: a wide spread means that the machine was busy. Ratios are then more reliable than milliseconds.
    Without --weights a timm model's weights are random, which takes the same time.

    example: spot bench scenes-a --tokens 9 16 --batch-size 1 --runtime eager onnx

    Args:
        tokens: numbers of tokens; by default an eighth, a quarter, half and all of the patch grid
        batch_size: images per batch; each size is timed
        runtime: eager PyTorch, torch.compile, ONNX Runtime; onnx files are exported first
        against: other timm models to compare with, NAME or NAME=TOP1 in percent
        early_exit: also time the model's cascade on the photographs in this folder. Each round takes different
            ones, because easy photographs take less time than hard ones. Other budgets are then timed only if --tokens
            names them
        cascade: a file that spot calibrate wrote, for --early-exit; by default the shipped one
        rounds: number of times that each model is timed
        threads: CPU threads. With one, processor time is measured, which other programs affect least
        device: cpu, cuda, cuda:1, mps; by default the GPU if there is one and only eager is timed
        plot: draw accuracy against time, or without known accuracies the speed-up against the ratio of multiply-adds
    """
    options.check_prior(prior)
    import torch

    from spot.export.bench import bench, display_rows
    from spot.plots import check_ending, save
    from spot.plots.accuracy import accuracy, throughput

    check_ending(plot)
    report.check_outputs(json, plot)
    alone = runtime == ("eager",) and early_exit is None
    device = device or ("cuda" if torch.cuda.is_available() and alone else "cpu")
    rows = bench(
        models, tokens=tokens, baselines=baseline, runtimes=runtime, against=against, batch_sizes=batch_size,
        photographs=early_exit, cascade=cascade, weights=weights, prior=prior, scale=scale, device=device,
        threads=threads, rounds=rounds,
    )  # fmt: skip
    title = f"{', '.join(dict.fromkeys(models))} ({device}, threads: {threads})"
    report.show(display_rows(rows), title)
    report.say(
        f"ms is the time per image, in brackets the middle half of {rounds} rounds in turns. Times as fast is over "
        f"the plain ViT of {rows[0]['model']} in the same runtime; over fastest dense, in its fastest runtime."
    )
    settings = {"command": report.command(), "device": device, "threads": threads, "rounds": rounds}
    report.save_json(json, rows, settings)
    if plot is None:
        return
    varies = [name for name in ("model", "runtime") if len({row[name] for row in rows}) > 1]
    named = [
        {**row, "budget": row["tokens"], "panel": f"batch {row['batch']}",
         "line": " ".join([*(row[name] for name in varies), *([row["method"]] if row["method"] != "timm" else [])])}
        for row in rows
    ]  # fmt: skip
    if any(row["accuracy"] is not None for row in rows):
        figure = accuracy(
            named, line="line", across="ms", value="accuracy", panel="panel",
            across_label="ms per image", label="top-1 in percent", title=title,
        )  # fmt: skip
    else:
        figure = throughput([{**row, "method": row["line"]} for row in named], title=title)
    save(figure, plot)
    report.say(f"The figure is in {plot}.")
