"""spot bench: how fast models and baselines are, beside what their multiply-adds promise."""

import copy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

if TYPE_CHECKING:
    from torch import nn

    from spot.models.spot_vit import SpotViT

Baseline = Literal["vit", "patch-dropout", "tome", "elastic"]


def bench(
    models: tyro.conf.Positional[tuple[str, ...]],
    /,
    tokens: tuple[int, ...] = (),
    batch_size: tuple[int, ...] = (1, 32),
    baseline: tuple[Baseline, ...] = ("vit", "patch-dropout", "tome"),
    prior: str | None = None,
    rounds: int = 11,
    compiled: bool = False,
    bf16: bool = False,
    device: str | None = None,
    threads: int | None = None,
    processor_time: bool = False,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Time models in turns in one process, and compare with the ratio of their multiply-adds.

    Every row's speed-up and MAC ratio are relative to the first row's model. A spread beyond a few
    percent says that the machine was busy; ratios survive that better than images per second do.

    Args:
        models: built-in models, folders, files or timm names. Weights do not change the time: a timm
            model is built without downloading any.
        tokens: budgets; by default an eighth, a quarter, half and all of the patch grid.
        batch_size: images at a time, each size measured.
        baseline: vit is the timm model itself, patch-dropout keeps as many patches, tome merges
            until its blocks cost as much, elastic shifts, rescales and drops patches.
        prior: where SPoT places tokens; by default as the model says.
        rounds: how often each model is timed.
        compiled: through torch.compile, which takes a while for every model.
        bf16: in bfloat16, where the device calculates in it.
        device: cpu, cuda, cuda:1, mps; by default the GPU if there is one.
        threads: CPU threads.
        processor_time: count the processor time of one CPU thread instead of the wall clock's; on a
            machine that others use too, this is far steadier. Goes with --threads 1.
        json: write the table, and what made it, to this file.
        plot: draw measured speed-up against MAC ratio.

    example: spot bench vit_small_patch16_224 --tokens 25 49 100 --batch-size 1 64
    """
    import torch

    from spot import report
    from spot.errors import InputError
    from spot.evaluation import throughput
    from spot.evaluation.cost import image_shape

    if not models:
        raise InputError("name at least one model, for example spot bench vit_small_patch16_224")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    entries: dict[str, nn.Module] = {}
    about: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(models):
        for method, budget, model in contestants(opened(name, device), tokens, baseline, prior):
            label = f"{name} {method} {budget}"
            entries[label] = model
            about[label] = {"name": name, "method": method, "budget": budget}
    shapes = {name: image_shape(model) for name, model in entries.items()}
    if len(set(shapes.values())) > 1:
        raise InputError("these models were built for images of different sizes; time them one by one")
    with throughput.threads(threads):
        rows = throughput.measure(
            entries,
            batch_sizes=list(dict.fromkeys(batch_size)),
            rounds=rounds,
            compiled=compiled,
            precision="bfloat16" if bf16 else "float32",
            clock="processor" if processor_time else "wall",
            shown=True,
        )
    rows = [{**about[row.pop("model")], **row} for row in rows]
    headline = title(models, device, compiled=compiled, bf16=bf16)
    for batch in dict.fromkeys(batch_size):
        chosen = [row for row in rows if row["batch"] == batch]
        report.show(readable(chosen), f"{headline}, batch {batch}")
    report.console.print(explained(rows))
    if json is not None:
        settings = {
            "command": shlex.join(["spot", *sys.argv[1:]]),
            "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
            "threads": threads or torch.get_num_threads(),
            "compiled": compiled,
            "precision": "bfloat16" if bf16 else "float32",
            "clock": "processor" if processor_time else "wall",
            "rounds": rounds,
        }
        report.save_json(json, rows, settings)
    if plot is not None:
        from spot.plots import save
        from spot.plots.throughput import throughput as draw

        named = [{**row, "method": f"{row['name']} {row['method']}"} if len(set(models)) > 1 else row for row in rows]
        save(draw(named, title=headline), plot)
        report.console.print(f"The figure is in {plot}.", soft_wrap=True)


def opened(name: str, device: str) -> "SpotViT":
    """A model on a device. A timm name gets random weights, which are as fast as any."""
    import timm
    import torch

    import spot
    from spot.errors import InputError
    from spot.models.checkpoints import built_in

    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the device {device!r} cannot be used here: {reason}") from None
    bare = name.removeprefix("timm/").split(".")[0]
    if name not in built_in() and not Path(name).exists() and timm.is_model(bare):
        return spot.adapt(bare).to(place).eval()
    return spot.load(name).to(place)


def contestants(
    model: "SpotViT", tokens: Sequence[int], baseline: Sequence[str], prior: str | None
) -> "list[tuple[str, int, nn.Module]]":
    """(method, budget, model) of everything to time, all sharing the one model's weights."""
    from spot.models.elastic import ElasticViT
    from spot.models.patch_dropout import PatchDropout
    from spot.models.plain import PlainViT
    from spot.models.tome import ToMe

    cells = len(model.grid())
    budgets = list(dict.fromkeys(tokens)) or sorted({-(-cells // part) for part in (8, 4, 2, 1)})
    found: list[tuple[str, int, Any]] = [("vit", cells, PlainViT(model))] if "vit" in baseline else []
    for budget in budgets:
        placed = copy.copy(model)  # shares the weights, has its own prior and budget
        placed.tokens, placed.prior = budget, model.prior if prior is None else prior
        found.append(("spot", budget, placed))
        if "patch-dropout" in baseline:
            found.append(("patch-dropout", budget, PatchDropout(model, budget)))
        if "tome" in baseline and budget < cells:
            found.append(("tome", budget, ToMe.matching(model, budget)))
        if "elastic" in baseline:
            found.append(("elastic", budget, ElasticViT(model, budget)))
    return found


def readable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table as a person reads it; the file keeps all columns and digits."""
    several = len({row["name"] for row in rows}) > 1
    table = []
    for row in rows:
        line: dict[str, Any] = {"model": row["name"]} if several else {}
        line |= {"method": row["method"], "tokens": row["budget"]}
        line |= {"speed-up": f"{row['speed-up']:.2f}×", "by MACs": f"{row['MAC ratio']:.2f}×"}
        line |= {"images/s": f"{row['images/s']:.3g} ±{row['spread']:.0%}"}
        line |= {"reading": f"{row['tokenizer']:.0%}", "MB": f"{row['peak MB']:.3g}"}
        table.append(line)
    return table


def title(models: Sequence[str], device: str, *, compiled: bool, bf16: bool) -> str:
    """What was timed, and how."""
    how = f"{'compiled' if compiled else 'eager'}, {'bfloat16' if bf16 else 'float32'}, {device}"
    return f"{', '.join(dict.fromkeys(models))} ({how})"


def explained(rows: list[dict[str, Any]]) -> str:
    """How to read the tables."""
    first = rows[0]
    text = f"Speed-ups are relative to {first['method']} at {first['budget']} tokens, medians over rounds in turns. "
    text += (
        "± is the middle half of the times, reading the share until the first block begins, MB what is alive at once."
    )
    if any(row["method"] == "tome" for row in rows):
        text += " tome begins with all tokens and merges until its blocks cost as much as the budget."
    return text
