"""Does the search move tokens to salient places: relative saliency gain (RSG) at every budget.

RSG = (score(end) − score(start)) / score(start), where score is the mean saliency in a token's window. The
paper averages it over tokens. This mean is biased upwards for any movement, more so for sharper maps: a
token that starts at an object's edge can gain tenfold, but lose at most everything. The same mean is
therefore computed for a control that moves each image's tokens as another image's were moved. The search's
preference is the excess over this control. The ratio of the mean scores of all tokens of an image is less
sensitive to edges.
"""

from functools import partial

import torch
from torch import Tensor

from paper.backbone import Backbone
from paper.lab import PAPER_IMAGES, Lab
from paper.plots import grouped_bars
from paper.statistics import mean
from paper.study import Result, Row, Study, Table, by_budget, each_value, figure, number, signed
from spot.data.loader import loader
from spot.hashes import hash_tensors
from spot.placement.files import Placements
from spot.placement.priors import omega
from spot.store import encode_names
from spot.tokens.windows import windows

QUANTITIES = {"rsg": "RSG", "control": "control", "excess": "excess", "image_excess": "excess, per image"}
NEAR_ZERO = 0.01  # a first score below this has no relative gain
PAPER_TOKENS = (25, 49, 100, 196)
PAPER = {
    "CLS-IN21k": (0.34, 0.33, 0.47, -0.14),
    "CLS-IN1k": (0.77, 0.77, 0.75, -1.53),
    "MAE-IN1k": (0.49, 0.54, 0.51, -0.08),
}


def run(lab: Lab) -> Result:
    """RSG of the isotropic searches, per backbone and budget, in percent."""
    rows: list[Row] = []
    for backbone in lab.backbones:
        for tokens in lab.tokens:
            made = measured(lab, backbone, lab.oracle(backbone, tokens=tokens))
            gains = {name: 100 * values for name, values in made.items()}
            row: Row = {"backbone": backbone.name, "tokens": tokens}
            for name, values in (
                ("rsg", gains["token"]),
                ("control", gains["token_control"]),
                ("excess", gains["token"] - gains["token_control"]),
                ("image_excess", gains["image"] - gains["image_control"]),
            ):
                known = mean(values)
                row[name] = known["mean"]
                row |= {f"{name}_{key}": known[key] for key in ("low", "high", "median", "p", "images")}
            rows.append(row)
    source = "the scenes' own masks" if lab.settings.scenes else lab.sources.maps_name()
    notes = [
        lab.conditions(),
        f"Saliency: {source}; the paper's is CLIPSeg's. Windows are as large as the model's patches.",
        "RSG (relative saliency gain) is the mean over tokens, as in the paper. Tokens that start with a saliency "
        f"below {NEAR_ZERO} have none and are left out. control: each image's tokens move as another image's did. "
        "excess: RSG minus the control's; per image: the same for all tokens of an image together. p: Wilcoxon's "
        "signed-rank test of the excess, over images.",
    ]
    return Result(rows, paper_rows(), notes)


def measured(lab: Lab, backbone: Backbone, searched: Placements) -> dict[str, Tensor]:
    """Gains (M,) per image, in the placements' order, and the control's: `token` is the mean over tokens, `image` the
    gain of their mean score, in which all tokens count."""
    model, ends = backbone.model, searched.trajectory[:, [0, -1], :, :2]
    source, size = lab.sources.saliency(model), model.patch_size
    about = {
        "kind": "saliency-gain",
        "name": backbone.name.replace("/", "-"),
        "tokens": searched.tokens,
        "window": size,
    }
    about["positions"] = hash_tensors({"ends": ends, "keys": encode_names(searched.keys)})
    about |= {"images": lab.sources.images_hash(model, oracle=True), "maps": lab.sources.maps_hash()}

    def compute() -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        images = lab.sources.images(model, oracle=True)
        for batch in loader(images, lab.settings.batch_size, lab.settings.workers):
            maps = source(batch.images, batch.keys)
            rows = searched.rows(batch.keys)
            start, end = ends[rows].unbind(1)
            other = ends[(rows + 1) % len(ends)]  # the next image's movement
            moved = (start + other[:, 1] - other[:, 0]).clamp(*omega(batch.images))
            before = score(maps, start, size)
            for suffix, there in (("", end), ("_control", moved)):
                after = score(maps, there, size)
                gains = {"token": relative_gain(before, after).nanmean(1)}
                gains["image"] = relative_gain(before.mean(1), after.mean(1))
                for name, gain in gains.items():
                    made.setdefault(name + suffix, torch.full((len(ends),), torch.nan))[rows] = gain
        return made

    return lab.remember(about, compute)


def score(maps: Tensor, positions: Tensor, size: int = 16) -> Tensor:
    """Mean of saliency maps (B, H, W) in the size × size window at each position (B, N, 2) → (B, N).

    Windows are read as for tokens: bilinear, with the border repeated.
    """
    return windows(maps[:, None].float(), positions, size).mean((2, 3, 4))


def relative_gain(before: Tensor, after: Tensor) -> Tensor:
    """(after − before) / before of scores: the paper's formula for a token, or for the mean scores of an image.

    NaN where the first score is below NEAR_ZERO: the ratio is meaningless, and one such token would dominate a mean.
    """
    return torch.where(before < NEAR_ZERO, torch.nan, (after - before) / before)


def paper_rows() -> list[Row]:
    return [
        {"backbone": f"paper: {backbone}", "tokens": tokens, "rsg": value, "rsg_images": PAPER_IMAGES}
        for backbone, values in PAPER.items()
        for tokens, value in zip(PAPER_TOKENS, values, strict=True)
    ]


TABLE: Table = {
    "backbone": "backbone", "tokens": "tokens",
    **{f"{what} %": partial(signed, value=name, digits=2) for name, what in QUANTITIES.items()},
    "p": number("excess_p", ".2g"), "images": "rsg_images",
}  # fmt: skip


def bars(result: Result) -> list[Row]:
    rows = by_budget(result.rows, result.paper)
    named = [{**row, "budget": budget.replace(" tokens", "").replace(":", "")} for row, budget in rows]
    return each_value(named, {what: (name, f"{name}_low", f"{name}_high") for name, what in QUANTITIES.items()})


STUDY = Study(
    "saliency-gain", "tab:spot_on_saliency",
    "Does the search prefer salient regions: how much more salient are the places to which it moves tokens?",
    run,
    figure(
        grouped_bars, bars, group="budget", bar="backbone", panel="what", label="gain, %",
        title="Saliency that tokens gain by the search, by number of tokens",
    ),
    TABLE,
)  # fmt: skip
