"""`spot demo`: the method in about a minute, on the built-in model and scenes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import spot
from spot import report
from spot.data.images import data_for
from spot.data.loader import loader
from spot.data.scenes import CLASSES, SceneBatch, Scenes
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, evaluate, top1_row
from spot.evaluation.cost import macs
from spot.models.shipped import built_in
from spot.models.spot_vit import SpotViT
from spot.models.wrappers import PatchDropout
from spot.placement.oracle import SearchResult
from spot.placement.saliency import rgb
from spot.plots import save
from spot.plots.accuracy import accuracy
from spot.plots.placements import Gallery, gallery_figure

PRIORS = ("uniform", "gaussian", "sobol", "isotropic", "center", "salient", "focus")
ORACLE, DROPOUT = "oracle", "patch dropout"


def on_scenes(
    name: str, model: SpotViT, budgets: Sequence[int], count: int, gallery: int, out: Path, seed: int = 0
) -> None:
    """Show a small version of the paper's main table, and write its two figures to the folder `out`."""
    if model.num_classes != len(CLASSES):
        classes = f"{model.num_classes} classes, the scenes are of {len(CLASSES)}"
        raise InputError(f"{name} has {classes}; choose a model of the scenes, such as scenes-a")
    data: Any = data_for(model, "scenes", split="test", limit=count)
    scenes = data.draw(range(count))
    rows = accuracies(name, model, data, budgets, seed)
    searches = {}
    for budget in report.track(budgets, "searching"):
        start = model.place(scenes.images, tokens=budget, prior="isotropic")
        searches[budget] = result = spot.search(model, scenes.images, scenes.labels, start, max_batch=64)
        right = (result.logits[:, -1].argmax(1) == scenes.labels).double().mean().item()
        rows.append({"placement": ORACLE, "tokens": budget, **top1_row(right, count)})
    report.show(
        side_by_side(rows, budgets),
        f"Top-1 accuracy, %, of {name} on {count} scenes it has never seen",
        digits=1,
        caption=f"{DROPOUT}: the ViT on a random part of its grid. salient: tokens drawn from the object's mask. "
        "focus: even coverage drawn towards it. "
        f"{ORACLE}: isotropic tokens after five steps of search with the label: what placement could give.",
    )
    middle = sorted(budgets)[min(1, len(budgets) - 1)]
    draw_gallery(model, scenes, searches[middle], gallery, out / "placements.png")
    gmacs = {budget: macs(model.at(tokens=budget, prior="isotropic")) / 1e9 for budget in budgets}
    costs = [{**row, "gmacs": gmacs[row["tokens"]]} for row in rows]
    save(accuracy(costs, title=f"{name}: what accuracy costs"), out / "accuracy.png")
    farewell(rows, min(budgets), len(model.grid()), out)


def accuracies(name: str, model: SpotViT, data: Scenes, budgets: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Accuracy of each prior and budget, and of patch dropout on the ViT before its retrofit, in one pass."""
    parent = spot.load(f"{name}-grid") if f"{name}-grid" in built_in() else model
    cells = len(parent.grid())
    dropped = [n for n in budgets if n <= cells]
    settings: list[Setting] = [Setting(seed=seed, name=DROPOUT, model=PatchDropout(parent, n)) for n in dropped]
    settings += [Setting(prior, n, seed) for prior in PRIORS for n in budgets]

    def masks(images: Tensor, keys: Sequence[str]) -> Tensor:
        return data.draw([int(key.rpartition("/")[2]) for key in keys]).masks

    return evaluate(model, loader(data, 64), settings, saliency=masks, title="evaluating").rows()


def side_by_side(rows: Sequence[Mapping[str, Any]], budgets: Sequence[int]) -> list[dict[str, Any]]:
    """One row per placement and one column per budget, as in the paper."""
    names = [f"{budget} tokens" for budget in budgets]
    lines = {row["placement"]: {"placement": row["placement"], **dict.fromkeys(names)} for row in rows}
    for row in rows:
        lines[row["placement"]][f"{row['tokens']} tokens"] = row["top1"]
    return list(lines.values())


def draw_gallery(model: SpotViT, scenes: SceneBatch, result: SearchResult, count: int, path: Path) -> None:
    """Draw the scenes whose class gained most probability in the search."""
    chance = result.logits.softmax(-1)[range(len(scenes.labels)), :, scenes.labels]  # (M, steps + 1)
    most = (chance[:, -1] - chance[:, 0]).argsort(descending=True)[:count].tolist()
    part = Gallery(
        rgb(scenes.images[most], model.data_config),
        result.trajectory[most],
        captions=[f"{CLASSES[scenes.labels[i]]}: {chance[i, 0]:.0%} → {chance[i, -1]:.0%}" for i in most],
        window=model.patch_size,
        title=f"{result.trajectory.shape[2]} tokens, moved by gradient: the class's probability before → after",
    )
    save(gallery_figure([part]), path)


def farewell(rows: Sequence[Mapping[str, Any]], sparse: int, cells: int, out: Path) -> None:
    """Summarise the results and suggest next commands."""
    score = {row["placement"]: row["top1"] for row in rows if row["tokens"] == sparse}
    best = max(("isotropic", "center"), key=score.__getitem__)
    report.say(
        f"\nWith {sparse} of {cells} tokens the model classifies {score[best]:.0f} % of the scenes correctly with the "
        f"{best} prior, {score['focus']:.0f} % with tokens on the object (focus), and {score[ORACLE]:.0f} % after a "
        f"gradient search with the label. So accuracy depends on where tokens are. Pictures: {out / 'placements.png'} "
        f"and {out / 'accuracy.png'}."
    )
    report.say(
        "\nNext:\n"
        "  spot search photo.jpg --tokens 49            on your photo, with a retrofitted ViT\n"
        "  spot evaluate MODEL --data DIR --tokens 49   on your data\n"
        "  spot retrofit MODEL --data DIR --out RUN     fine-tune your ViT for few tokens, without labels"
    )
