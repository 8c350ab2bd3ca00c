"""`spot demo`: the method in about a minute, on the built-in model and scenes."""

from collections.abc import Sequence
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
from spot.models.baselines import PatchDropout
from spot.models.shipped import built_in
from spot.models.spot_vit import SpotViT
from spot.placement.oracle import SearchResult
from spot.placement.saliency import rgb
from spot.plots import save
from spot.plots.accuracy import accuracy
from spot.plots.placements import Gallery, gallery_figure

PRIORS = ("uniform", "gaussian", "sobol", "isotropic", "center", "salient", "focus")
ORACLE, DROPOUT = "oracle", "patch dropout"
GALLERY = 10  # scenes


def run_demo(name: str, budgets: Sequence[int], count: int, out: Path) -> None:
    """Show a small version of the paper's main table, and write its two figures to the folder `out`."""
    model = spot.load(name)
    if model.num_classes != len(CLASSES):
        classes = f"{model.num_classes} classes, the scenes are of {len(CLASSES)}"
        raise InputError(f"{name} has {classes}; choose a model of the scenes, such as scenes-a")
    data: Any = data_for(model, "scenes", split="test", limit=count)
    scenes = data.draw(range(count))
    rows = evaluate_priors(name, model, data, budgets)
    searches = {}
    for budget in report.track(budgets, "searching"):
        start = model.place(scenes.images, tokens=budget, prior="isotropic")
        searches[budget] = result = spot.search(model, scenes.images, scenes.labels, start, max_batch=64)
        right = (result.logits[:, -1].argmax(1) == scenes.labels).double().mean().item()
        rows.append({"placement": ORACLE, "tokens": budget, **top1_row(right, count)})
    top1 = {(row["placement"], row["tokens"]): row["top1"] for row in rows}
    report.show(
        [
            {"placement": placement, **{f"{budget} tokens": top1.get((placement, budget)) for budget in budgets}}
            for placement in (DROPOUT, *PRIORS, ORACLE)
        ],
        f"Top-1 accuracy, %, of {name} on {count} unseen scenes",
        digits=1,
        caption=f"{DROPOUT}: the ViT on a random part of its grid. salient: tokens drawn from the object's mask. "
        "focus: even coverage, denser on the object. "
        f"{ORACLE}: isotropic tokens after five steps of gradient search with the label.",
    )
    draw_gallery(model, scenes, searches[sorted(budgets)[min(1, len(budgets) - 1)]], out / "placements.png")
    gmacs = {budget: macs(model.at(tokens=budget, prior="isotropic")) / 1e9 for budget in budgets}
    costs = [{**row, "gmacs": gmacs[row["tokens"]]} for row in rows]
    save(accuracy(costs, title=f"{name}: accuracy against cost"), out / "accuracy.png")
    score = {placement: top1[placement, min(budgets)] for placement in (*PRIORS, ORACLE)}
    best = max(("isotropic", "center"), key=score.__getitem__)
    report.say(
        f"\nWith {min(budgets)} of {len(model.grid())} tokens the model classifies {score[best]:.0f} % of the scenes "
        f"correctly with the {best} prior, {score['focus']:.0f} % with tokens on the object (focus), and "
        f"{score[ORACLE]:.0f} % after a gradient search with the label. So accuracy depends on where tokens are. "
        f"Pictures: {out / 'placements.png'} and {out / 'accuracy.png'}."
    )
    report.say(
        "\nNext:\n"
        "  spot search photo.jpg --tokens 49            on your photo, with a retrofitted ViT\n"
        "  spot evaluate MODEL --data DIR --tokens 49   on your data\n"
        "  spot retrofit MODEL --data DIR --out RUN     fine-tune your ViT for few tokens, without labels"
    )


def evaluate_priors(name: str, model: SpotViT, data: Scenes, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """Accuracy of each prior and budget, and of patch dropout on the ViT before its retrofit, in one pass."""
    parent = spot.load(f"{name}-grid") if f"{name}-grid" in built_in() else model
    settings: list[Setting] = [
        Setting(name=DROPOUT, model=PatchDropout(parent, n)) for n in budgets if n <= len(parent.grid())
    ]
    settings += [Setting(prior, n) for prior in PRIORS for n in budgets]

    def masks(images: Tensor, keys: Sequence[str]) -> Tensor:
        return data.draw([int(key.rpartition("/")[2]) for key in keys]).masks

    return evaluate(model, loader(data, 64), settings, saliency=masks, title="evaluating").rows()


def draw_gallery(model: SpotViT, scenes: SceneBatch, result: SearchResult, path: Path) -> None:
    """Draw the ten scenes whose class gained most probability in the search."""
    probability = result.logits.softmax(-1)[range(len(scenes.labels)), :, scenes.labels]  # (M, steps + 1)
    best = (probability[:, -1] - probability[:, 0]).argsort(descending=True)[:GALLERY].tolist()
    part = Gallery(
        rgb(scenes.images[best], model.data_config),
        result.trajectory[best],
        captions=[f"{CLASSES[scenes.labels[i]]}: {probability[i, 0]:.0%} → {probability[i, -1]:.0%}" for i in best],
        window=model.patch_size,
        title=f"{result.trajectory.shape[2]} tokens, moved by gradient: the class's probability before → after",
    )
    save(gallery_figure([part]), path)
