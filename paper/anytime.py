"""Early exit: accuracy against mean multiply-adds of cascades, single budgets, ToMe and a smaller image.

Cascades are calibrated for several expected losses on images of the bank, without their labels, and measured on the
study's images. Every possible stage runs once on every image; the stage at which an image stops is computed from these
predictions. For comparison the table contains published results of two cascades of ViTs that were trained for early
exit for 300 epochs.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paper.backbone import Backbone
from paper.lab import Lab
from paper.statistics import Predictions, accuracy_row, difference
from paper.study import Result, Row, Study, Table, cell, figure, number, signed
from paper.timing import in_first_process
from spot.data.loader import Batch, loader
from spot.errors import InputError
from spot.evaluation.accuracy import Setting
from spot.evaluation.cost import macs
from spot.evaluation.early_exit import (
    Candidate,
    Predicted,
    choose_cascade,
    fit_combinations,
    possible_stages,
    predict_all,
)
from spot.evaluation.throughput import Clock, interleaved
from spot.hashes import hash_tensors
from spot.models.cascade import Cascade, Stage, stage_model
from spot.placement.priors import LEARNED
from spot.plots.accuracy import accuracy

LOSSES = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05)
RIVALS = ("tome-cost", "resize")
CALIBRATING = 500  # images
NEAR = 9  # the figure shows results down to this many points below the dense ViT
TIMED, ROUNDS = 64, 5  # number of images and of rounds for timing a cascade

# DeiT-S, dense 79.8 % at 4.6 G; CF-ViT (AAAI 2023) and DVT (NeurIPS 2021), from their tables.
PUBLISHED = {"CF-ViT": ((78.5, 1.53), (80.0, 1.97)), "DVT": ((79.1, 2.29),)}
DENSE = (79.8, 4.6)


def run(lab: Lab) -> Result:
    """Cascades for every calibration goal, single budgets and baselines, against the dense ViT on the same images."""
    if lab.settings.bank is None:
        raise InputError("anytime calibrates cascades on other images than it measures; give a folder with --bank")
    rows: list[Row] = []
    calibrated = 0
    for backbone in lab.backbones:
        model, cells = backbone.model, len(backbone.model.grid())
        budgets = [tokens for tokens in lab.tokens if tokens < cells]
        priors = (None,) if model.policy is None else (None, LEARNED)
        by_prior = {prior: predictions(lab, backbone, budgets, prior) for prior in priors}
        stages, measured, calibrating = by_prior[None]
        dense = next(stage.macs for stage in stages if stage.tokens == cells)
        calibrated = len(calibrating.labels)
        base = measured.dense.argmax(1) == measured.labels
        about: Row = {"backbone": backbone.name}
        rows.append(about | {"method": "dense ViT", "tokens": cells, **measured_row(base, base, 1.0)})
        for stage, logits in zip(stages, measured.stages, strict=True):
            row = measured_row(logits.argmax(1) == measured.labels, base, stage.macs / dense)
            method = "merging" if stage.merged else "one budget"
            rows.append(about | {"method": method, "tokens": stage_name(stage), **row})
        for method, prior, merge in CASCADES:
            if prior not in by_prior:
                continue
            stages, measured, calibrating = by_prior[prior]
            used = [index for index, stage in enumerate(stages) if merge or not stage.merged]
            calibrating = calibrating._replace(stages=calibrating.stages[used])
            fitted = fit_combinations(calibrating, [stages[index] for index in used])
            for lose in LOSSES:
                chosen = choose_cascade(calibrating, stages, lose=lose, fitted=fitted).stages
                right, spent, agreed = cascade_outcome(measured, chosen, stages)
                row = measured_row(right, base, spent.double().mean().item() / dense)
                names = " → ".join(map(stage_name, chosen))
                rows.append(about | {"method": method, "tokens": names, "lose": 100 * lose, **row, "agreed": agreed})
                if lose == 0.01:
                    rows[-1] |= timed(lab, backbone, cascade_of(backbone, chosen, prior))
        for (rival, tokens), made in rivals(lab, backbone, budgets).items():
            price = macs(lab.model(backbone, Setting(rival, tokens)))
            rows.append(about | {"method": rival, "tokens": tokens, **measured_row(made.right, base, price / dense)})
    notes = [
        lab.conditions(searched=False),
        f"Cascades are calibrated on {calibrated} other images without their labels, for at most this expected loss of "
        "accuracy in points, estimated from the dense ViT's probabilities. agreed: how often the cascade predicts the "
        "dense ViT's class on the study's images. 196–30: similar tokens are merged (ToMe) until 30 are left. Costs "
        "include all stages and the placement.",
        "The change is relative to the dense ViT on the same images. Time is processor time of one thread, divided by "
        f"the dense ViT's: the median of {ROUNDS} rounds on {TIMED} images, in batches of 1 and of 32. Batches shrink "
        "as images finish.",
        "The dense ViT, tome-cost and resize have the plain ViT's weights; budgets and cascades have the retrofit's. "
        "Published: DeiT-S relative to its own dense model, trained for early exit for 300 epochs.",
    ]
    return Result(rows, published(), notes)


# Names of cascades, the prior of their early stages, and whether stages may merge tokens.
CASCADES: tuple[tuple[str, str | None, bool], ...] = (
    ("cascade", None, False),
    ("cascade that merges", None, True),
    ("cascade, learned placement", LEARNED, False),
    ("cascade that merges, learned", LEARNED, True),
)


def stage_name(stage: Stage) -> str:
    """A stage's name in tables."""
    return f"{stage.tokens}–{stage.tokens_left}" if stage.merged else str(stage.tokens)


def predictions(
    lab: Lab, backbone: Backbone, budgets: Sequence[int], prior: str | None
) -> tuple[list[Stage], Predicted, Predicted]:
    """The possible stages, and their predictions for the measured images and for the calibration images."""
    candidates = possible_stages(backbone.loaded, budgets, prior=prior)
    cells = candidates[-1][0].tokens
    early = sum(stage.tokens < cells for stage, _ in candidates)  # their number; the others have the grid
    if backbone.parent is not None:  # the last stage is the original ViT
        dense = backbone.parent.at(tokens=cells)
        candidates[early:] = [(stage, stage_model(dense, stage, grid=True)) for stage, _ in candidates[early:]]

    def joined(bank: bool) -> Predicted:
        grid = cached_predictions(lab, backbone, candidates[early:], bank=bank)
        # Only early stages depend on the prior. They are run with one stage of the grid.
        first = cached_predictions(lab, backbone, candidates[: early + 1], bank=bank, prior=prior)
        return grid._replace(stages=torch.cat([first.stages[:early], grid.stages]))

    return [stage for stage, _ in candidates], joined(bank=False), joined(bank=True)


def cascade_of(backbone: Backbone, stages: Sequence[Stage], prior: str | None) -> Cascade:
    """A cascade of the backbone, whose last stage is the original ViT if it is known."""
    cascade = Cascade(backbone.loaded, stages, prior=prior)
    if backbone.parent is not None:
        cascade.models[-1] = stage_model(backbone.parent.at(tokens=stages[-1].tokens), stages[-1], grid=True)
    return cascade


def cached_predictions(
    lab: Lab, backbone: Backbone, candidates: Sequence[Candidate], *, bank: bool, prior: str | None = None
) -> Predicted:
    """Every stage's predictions for the study's images, or for some of the bank's, from the lab's cache."""
    model = backbone.model
    images = lab.sources.bank(model) if bank else lab.sources.images(model)
    hashed = lab.sources.images_hash(model, bank=bank)
    about: Row = {"kind": "stages", "name": backbone.name.replace("/", "-"), "model": backbone.hash, "images": hashed}
    about |= {"base": backbone.parent_hash, "bank": bank, "limit": CALIBRATING}
    about["stages"] = [[each.tokens, *each.merged] for each, _ in candidates]
    if prior is not None and model.policy is not None:
        about["prior"] = hash_tensors(model.policy.state_dict())

    def compute() -> dict[str, Tensor]:
        some = evenly_spaced(CALIBRATING, images) if bank else images
        made = predict_all(candidates, loader(some, lab.settings.batch_size, lab.settings.workers))
        order = torch.tensor(sorted(range(len(made.keys)), key=made.keys.__getitem__))  # the order of lab.accuracy
        return {"stages": made.stages[:, order].half(), "dense": made.dense[order].half(), "labels": made.labels[order]}

    kept = lab.remember(about, compute)
    return Predicted(kept["stages"].float(), kept["dense"].float(), kept["labels"])


def evenly_spaced(count: int, images: Any) -> Any:
    """At most `count` of the images, evenly spaced."""
    if len(images) <= count:
        return images
    return torch.utils.data.Subset(images, [index * len(images) // count for index in range(count)])


def cascade_outcome(made: Predicted, stages: Sequence[Stage], every: Sequence[Stage]) -> tuple[Tensor, Tensor, float]:
    """A cascade's correctness (M,), cost per image (M,), and agreement with the dense ViT in percent."""
    known, answer = torch.zeros_like(made.dense), torch.zeros_like(made.labels)
    left, spent = torch.ones_like(answer, dtype=torch.bool), torch.zeros_like(answer)
    places = {(stage.tokens, stage.merged): index for index, stage in enumerate(every)}
    for stage in stages:
        known = stage.add(made.stages[places[stage.tokens, stage.merged]], known)
        spent = spent + left * stage.macs
        answer = torch.where(left, known.argmax(1), answer)
        left = left & (known.softmax(1).amax(1) < stage.threshold)
    return answer == made.labels, spent, 100 * (answer == made.dense.argmax(1)).double().mean().item()


def measured_row(right: Tensor, base: Tensor, cost: float) -> Row:
    return {"share": cost, **accuracy_row(right), **({} if right is base else difference(base, right))}


def rivals(lab: Lab, backbone: Backbone, budgets: Sequence[int]) -> dict[tuple[str, int], Predictions]:
    """ToMe and the smaller image at the same budgets, if these are possible."""
    settings = {}
    for rival in RIVALS:
        for tokens in budgets:
            try:
                lab.candidate(backbone, Setting(rival, tokens))
            except InputError:  # merging cannot reach this budget, or there is no such image size
                continue
            settings[rival, tokens] = Setting(rival, tokens)
    return lab.accuracy(backbone, settings)


def timed(lab: Lab, backbone: Backbone, cascade: Cascade) -> Row:
    """A cascade's time as a share of the dense ViT's, on images of the study, at batch 1 and 32."""
    batches: list[Batch] = list(loader(evenly_spaced(TIMED, lab.sources.images(backbone.model)), 32))
    pixels = torch.cat([batch.images for batch in batches])
    dense = backbone.parent or backbone.at(cascade.budgets[-1])
    grid = dense.grid(pixels[:1])
    calls = {
        "cascade": lambda part: list(cascade(part)),
        "dense": lambda part: dense(part, grid.expand(len(part), -1, -1)),
    }

    @torch.no_grad()
    def call(clock: Clock, _: int) -> Row:
        row: Row = {}
        for batch in (1, 32):
            parts = pixels.split(batch)
            seconds = interleaved(calls, lambda _, parts=parts: parts, ROUNDS, clock)  # type: ignore[misc]
            row[f"time {batch}"] = median(a / b for a, b in zip(seconds["cascade"], seconds["dense"], strict=True))
        return row

    return in_first_process(lab, call)


def published() -> list[Row]:
    return [
        {"backbone": "published: DeiT-S", "method": name, "tokens": "", "share": cost / DENSE[1], "top1": top1,
         "delta": top1 - DENSE[0]}
        for name, points in PUBLISHED.items()
        for top1, cost in points
    ]  # fmt: skip


TABLE: Table = {
    "backbone": "backbone", "method": "method", "tokens": "tokens", "lose %": "lose",
    "agreed %": number("agreed", ".1f"), "MACs": number("share", ".2f"), "top-1 %": cell, "change": signed,
    "time, batch 1": number("time 1", ".2f"), "batch 32": number("time 32", ".2f"),
}  # fmt: skip


def points(result: Result) -> list[Row]:
    """Rows of the figure: those near the dense ViT, so that lines remain distinguishable. The table has all rows."""
    return [row for row in result.rows if row["share"] <= 1.5 and row.get("delta", 0.0) >= -NEAR]


STUDY = Study(
    "anytime", "no table; its outlook",
    "How accurate is early exit at its cost, compared with one budget for all images, merging and a smaller image?",
    run,
    figure(
        accuracy, points, line="method", across="share", value="top1", panel="backbone",
        across_label="mean multiply-adds, as a share of the dense ViT", title="Early exit", log=False,
    ),
    TABLE,
)  # fmt: skip
