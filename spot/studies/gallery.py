"""Pictures: where an oracle moves tokens, over saliency masks for every prior, adversarially, and the priors alone.

The images are not picked by what they show: they stand evenly spaced among those that are searched.
The file keeps them as PNG, so that the figure can be drawn again without data or model.
"""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from spot.data.classes import class_names
from spot.data.scenes import CLASSES
from spot.placement.oracle import PRESETS, SearchResult, search
from spot.placement.priors import omega
from spot.placement.saliency import rgb
from spot.studies.lab import Lab
from spot.studies.study import Figure, Result, Row, Study, pivot

PRIORS = ("uniform", "gaussian", "sobol", "isotropic", "center", "salient")
TRAJECTORIES, MASKS, ADVERSARIAL, PLACES = "trajectories", "over masks", "adversarial", "priors"
SHOWN, OVER_MASKS, SIDE_BY_SIDE = 10, 3, 2  # images
PRESET = "paper-long"  # as in the paper's figure, whose caption has this search's accuracy
CHANGE = "the class's probability before → after"
# Part → the paper's figure, images to a row, title.
PARTS = {
    TRAJECTORIES: ("fig:oracle_movement", 5, f"Searched: {CHANGE}"),
    MASKS: ("fig:oracle_movement_vs_mask_allpriors", 6, "Searched from every prior, over what is salient"),
    ADVERSARIAL: ("fig:adv_oracle_movement", 5, f"Searched adversarially (ascent): {CHANGE}"),
    PLACES: ("fig:sampling_priors", 6, "The priors, before any search"),
}


def run(lab: Lab) -> Result:
    """The first backbone at the sparse budget; only the images shown are searched."""
    backbone, given = lab.backbones[0], PRESETS[PRESET]
    model = backbone.model
    data: Any = lab.sources.images(model, oracle=True)
    samples = [sample for sample in (data[index] for index in spaced(range(len(data)), SHOWN)) if sample is not None]
    images, labels = torch.stack([each[0] for each in samples]), torch.tensor([each[1] for each in samples])
    images, keys = images.to(next(model.parameters()).device), [each[2] for each in samples]
    maps = lab.sources.saliency(model)(images, keys)
    searched = {}
    for prior in PRIORS:
        start = model.place(images, tokens=lab.sparse, prior=prior, keys=keys, maps=maps)
        searched[prior] = search(model, images, labels, start, given)
    start = model.place(images, tokens=lab.sparse, prior="isotropic")
    away = search(model, images, labels, start, given, objective="ascent")
    panels = [
        panel(part, keys, labels, row, prior, result)
        for part, count, results in (
            (TRAJECTORIES, SHOWN, {"isotropic": searched["isotropic"]}),
            (MASKS, OVER_MASKS, searched),
            (ADVERSARIAL, SHOWN, {"isotropic": away}),
            (PLACES, SIDE_BY_SIDE, searched),
        )
        for row in spaced(range(len(keys)), count)
        for prior, result in results.items()
    ]
    known = CLASSES if lab.settings.scenes else class_names(model)
    names = [known[label].split(",")[0] if known else f"class {label}" for label in labels.tolist()]
    kept: Row = {
        "images": dict(zip(keys, map(png, rgb(images, model.data_config)), strict=True)),
        "masks": dict(zip(keys, map(png, maps), strict=True)),
        "classes": dict(zip(keys, names, strict=True)),
        "panels": panels,
    }
    rows = [
        {"part": each["part"], "image": each["image"], "class": kept["classes"][each["image"]]}
        | {name: each[name] for name in ("prior", "before", "after")}
        for each in panels
        if each["part"] != PLACES
    ]
    low, high = (end.cpu() for end in omega(images))
    ends = searched["isotropic"].positions[..., :2].cpu()
    held = ((ends <= low) | (ends >= high)).any(-1).double().mean().item()
    notes = [
        f"{backbone.name}, {lab.sparse} tokens, {given.steps} steps at {given.lr:g}; {len(keys)} of "
        f"{len(data):,} images, evenly spaced, not picked. Paths run from dark purple to bright yellow, adversarial "
        "ones to red.",
        f"Over masks, what is salient is bright, by {lab.describe()['saliency']}.",
        f"Positions are kept in the image; {100 * held:.0f} % of isotropic tokens end on its border. The paper notes "
        "that after 20 steps or more many leave it.",
        "The paper's figures show ImageNet photographs with 25 tokens, and no numbers.",
    ]
    paper = [{"part": part, "figure": figure} for part, (figure, _, _) in PARTS.items()]
    return Result(rows, paper, notes, {"shown": len(keys), "preset": PRESET}, kept)


def spaced(things: Sequence[int], count: int) -> list[int]:
    """So many of them, evenly spaced, or all."""
    count = min(count, len(things))
    return [things[index * len(things) // count] for index in range(count)]


def panel(part: str, keys: Sequence[str], labels: Tensor, row: int, prior: str, result: SearchResult) -> Row:
    """One picture of a gallery: the tokens' way, and the class's probability before and after, in percent."""
    chance = 100 * result.logits[row].softmax(-1)[:, labels[row]]
    steps = result.trajectory[row] if part != PLACES else result.trajectory[row, :1]
    rounded = [[[round(value, 5) for value in place] for place in step] for step in steps.tolist()]
    about = {"part": part, "image": keys[row], "prior": prior, "trajectory": rounded}
    return about | {"before": chance[0].item(), "after": chance[-1].item()}


def png(picture: Tensor) -> str:
    """A picture (3, H, W) or map (H, W) in [0, 1] as text."""
    values = (picture.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    file = io.BytesIO()
    Image.fromarray(values.transpose(1, 2, 0) if values.ndim == 3 else values).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def from_png(text: str) -> Tensor:
    """The picture again: (3, H, W) or (H, W) in [0, 1]."""
    values = torch.from_numpy(np.array(Image.open(io.BytesIO(base64.b64decode(text))))).float() / 255
    return values.permute(2, 0, 1) if values.ndim == 3 else values


def table(result: Result) -> list[Row]:
    """Probabilities before and after, a column per prior."""
    return pivot(result.rows, ("part", "image", "class"), "prior", change)


def change(row: Row) -> str:
    """A class's probability before and after."""
    return f"{row['before']:.0f} → {row['after']:.0f} %"


def draw(result: Result) -> Figure:
    from spot.plots.placements import Gallery, galleries

    data = result.data
    images, masks = ({key: from_png(text) for key, text in data[name].items()} for name in ("images", "masks"))
    parts = []
    for part, (label, columns, title) in PARTS.items():
        shown = [each for each in data["panels"] if each["part"] == part]
        classes = data["classes"] if part in (TRAJECTORIES, ADVERSARIAL) else None
        captions = [
            (classes[each["image"]] if classes else each["prior"]) + ("" if part == PLACES else f": {change(each)}")
            for each in shown
        ]
        parts.append(
            Gallery(
                [images[each["image"]] for each in shown],
                [torch.tensor(each["trajectory"]) for each in shown],
                captions=captions,
                masks=[masks[each["image"]] for each in shown] if part == MASKS else None,
                adversarial=part == ADVERSARIAL,
                columns=columns,
                title=f"{title} ({label})",
            )
        )
    return galleries(parts, width=13)


STUDY = Study(
    "gallery", ", ".join(figure for figure, _, _ in PARTS.values()),
    "Where does an oracle move tokens, over saliency masks, adversarially, and where do priors put them?",
    run, draw, table,
)  # fmt: skip
