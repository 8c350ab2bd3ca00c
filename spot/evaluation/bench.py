"""Models and baselines timed in turns in one process, beside their multiply-adds: what `spot bench` does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch

from spot.errors import InputError
from spot.evaluation import throughput
from spot.evaluation.cost import image_shape
from spot.models.baselines import BASELINES
from spot.models.checkpoints import built_in, load
from spot.models.protocol import Placed, TokenModel
from spot.models.spot_vit import SpotViT, adapt
from spot.placement.sizes import Scale


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
    """Rows of `spot.evaluation.throughput.measure` for every model, method and budget.

    Args:
        tokens: budgets; by default an eighth, a quarter, half and all of the patch grid.
        scale: of the windows that models place; by default their own.
        timing: of `throughput.measure`: batch_sizes, rounds, compiled, precision, clock.
    """
    entries: dict[str, TokenModel] = {}
    about: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(models):
        for method, budget, model in candidates(opened(name, device, scale), tokens, baselines, prior):
            label = f"{name} {method} {budget}"
            entries[label] = model
            about[label] = {"name": name, "method": method, "budget": budget}
    if len({image_shape(model) for model in entries.values()}) > 1:
        raise InputError("these models were built for images of different sizes; time them one by one")
    with throughput.threads(threads):
        rows = throughput.measure(entries, shown=True, **timing)
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
