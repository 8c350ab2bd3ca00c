"""Models and baselines timed in turns in one process, beside their multiply-adds: what `spot bench` does."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch

from spot.errors import InputError
from spot.evaluation import throughput
from spot.evaluation.cost import image_shape
from spot.models.checkpoints import built_in, load
from spot.models.elastic import ElasticViT
from spot.models.patch_dropout import PatchDropout
from spot.models.plain import PlainViT
from spot.models.spot_vit import SpotViT, adapt
from spot.models.tome import ToMe


def bench(
    models: Sequence[str],
    *,
    tokens: Sequence[int] = (),
    baselines: Sequence[str] = (),
    prior: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    **timing: Any,
) -> list[dict[str, Any]]:
    """Rows of `spot.evaluation.throughput.measure` for every model, method and budget.

    Args:
        tokens: budgets; by default an eighth, a quarter, half and all of the patch grid.
        timing: of `throughput.measure`: batch_sizes, rounds, compiled, precision, clock.
    """
    entries: dict[str, Any] = {}
    about: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(models):
        for method, budget, model in candidates(opened(name, device), tokens, baselines, prior):
            label = f"{name} {method} {budget}"
            entries[label] = model
            about[label] = {"name": name, "method": method, "budget": budget}
    if len({image_shape(model) for model in entries.values()}) > 1:
        raise InputError("these models were built for images of different sizes; time them one by one")
    with throughput.threads(threads):
        rows = throughput.measure(entries, shown=True, **timing)
    return [{**about[row.pop("model")], **row} for row in rows]


def opened(name: str, device: str) -> SpotViT:
    """A model on a device. A timm name gets random weights, which are as fast as any."""
    try:
        there = torch.device(device)
        torch.empty(0, device=there)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the device {device!r} cannot be used here: {reason}") from None
    bare = name.removeprefix("timm/").split(".")[0]
    if name not in built_in() and not Path(name).exists() and timm.is_model(bare):
        return adapt(bare).to(there).eval()
    return load(name).to(there)


def candidates(
    model: SpotViT, tokens: Sequence[int], baselines: Sequence[str], prior: str | None
) -> list[tuple[str, int, Any]]:
    """(method, budget, model) of everything to time, all sharing the one model's weights."""
    cells = len(model.grid())
    budgets = list(dict.fromkeys(tokens)) or sorted({-(-cells // part) for part in (8, 4, 2, 1)})
    chosen: list[tuple[str, int, Any]] = [("vit", cells, PlainViT(model))] if "vit" in baselines else []
    for budget in budgets:
        placed = copy.copy(model)  # shares the weights, has its own prior and budget
        placed.tokens, placed.prior = budget, model.prior if prior is None else prior
        chosen.append(("spot", budget, placed))
        if "patch-dropout" in baselines:
            chosen.append(("patch-dropout", budget, PatchDropout(model, budget)))
        if "tome" in baselines and budget < cells:
            chosen.append(("tome", budget, ToMe.matching(model, budget)))
        if "elastic" in baselines:
            chosen.append(("elastic", budget, ElasticViT(model, budget)))
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
    if any(row["method"] == "tome" for row in rows):
        text += " tome begins with all tokens and merges until its blocks cost as much as the budget."
    return text
