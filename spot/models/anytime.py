"""Stop when sure: few tokens first, and more only for the images that need them.

    for step in model.look(images):             # stages as they were calibrated for this model
        step.logits, step.confidence            # what is known of every image so far
        step.tokens, step.macs, step.done       # what it has cost so far, and who is finished
    for step in model.look(images, until=0.8):  # stop each image at this confidence instead

A cascade is a list of stages, each a forward pass with more tokens than the one before, for the images that are
still in the batch; the last one has the whole grid. Each may merge similar tokens on the way (ToMe). A stage's
log-probabilities are added to those of the stages before with weights that make the sum agree best with a dense ViT, so
confidence (the largest probability) means how likely the dense ViT says the same. `spot calibrate`
(spot/evaluation/anytime.py) chooses stages, weights and thresholds on unlabelled images.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from spot.errors import InputError
from spot.placement.policy import hash_of
from spot.store import read_json, write_json

if TYPE_CHECKING:
    from spot.models.protocol import TokenModel
    from spot.models.spot_vit import SpotViT

FORMAT = 1


@dataclass(frozen=True)
class Stage:
    """One forward pass of a cascade."""

    tokens: int
    macs: int  # multiply-adds of this forward pass with its placement
    threshold: float = 0.0  # an image with this confidence is done; 0 for the last stage
    own: float = 1.0  # weight of this stage's log-probabilities
    earlier: float = 0.0  # and of what the stages before added up to
    merged: tuple[int, ...] = ()  # how many similar tokens each block merges away; none do where it is empty

    def left(self) -> int:
        """How many tokens leave the last block."""
        return self.tokens - sum(self.merged)


@dataclass(frozen=True)
class Cascade:
    """Stages that were calibrated for a model. The last one is the whole grid: of the model, or of its base."""

    stages: tuple[Stage, ...]
    hash: str  # of the model's weights
    base: bool = False  # the last stage is the ViT that the model was retrofitted from
    prior: str | None = None  # where tokens go; by default as the model says
    made: dict[str, Any] = field(default_factory=dict)  # how it was calibrated, and what it reached there

    def save(self, path: str | Path) -> None:
        """Write the cascade as JSON."""
        write_json(path, {"format": FORMAT, **asdict(self)})


class Step(NamedTuple):
    """What is known of B images after a stage, which R of them went through."""

    logits: Tensor  # (B, classes), log-probabilities up to a constant
    confidence: Tensor  # (B,), the largest probability
    tokens: Tensor  # (B,) int64, in all stages so far
    macs: Tensor  # (B,) int64, in all stages so far
    done: Tensor  # (B,) bool
    rows: Tensor  # (R,) int64, the images that this stage looked at
    positions: Tensor  # (R, N, 2 or 3), and where


def load_cascade(path: str | Path, model: "SpotViT") -> Cascade:
    """A cascade from its file; refuses one that was calibrated for another model."""
    about = read_json(path, "a calibration, as spot calibrate writes it")
    try:
        if about.pop("format") != FORMAT:
            raise InputError(f"{path} is a calibration in another format than {FORMAT}")
        cascade = Cascade(
            **{**about, "stages": tuple(read_stage(each, len(model.vit.blocks)) for each in about["stages"])}
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged, or no calibration that spot calibrate wrote: {error}") from error
    if cascade.hash != (own := hash_of(model)):
        raise InputError(f"{path} was calibrated for another model ({cascade.hash}, not {own}); use spot calibrate")
    return cascade


def read_stage(about: dict[str, Any], depth: int) -> Stage:
    """A stage as JSON has it; version 0.2 had one number, of tokens merged in each of the blocks."""
    merged = about.get("merged", ())
    return Stage(
        **{**about, "merged": (merged,) * depth if merged and isinstance(merged, int) else tuple(merged or ())}
    )


def calibrated(model: "SpotViT") -> Cascade:
    """A model's own cascade; a sentence where there is none."""
    if model.cascade is None:
        raise InputError(
            f"{model.name} was never calibrated, so its confidence means nothing; use spot calibrate first"
        )
    return model.cascade


def look(model: "SpotViT", images: Tensor, until: float | None = None) -> Iterator[Step]:
    """Look at images (B, C, H, W) with more and more tokens; the batch shrinks as images are done.

    until: the confidence at which an image is done at any stage, instead of the calibrated thresholds.
    """
    cascade = calibrated(model)
    if until is not None and not 0 < until <= 1:
        raise InputError(f"until is a confidence, above 0 and at most 1, got {until}")
    known = images.new_zeros(len(images), model.num_classes, dtype=torch.float32)
    tokens, macs = (torch.zeros(len(images), dtype=torch.int64, device=images.device) for _ in range(2))
    rows = torch.arange(len(images), device=images.device)
    for number, stage in enumerate(cascade.stages):
        left, last = images if len(rows) == len(images) else images[rows], number + 1 == len(cascade.stages)
        reader = reader_of(model, stage, grid=last, base=cascade.base, prior=cascade.prior, images=left)
        positions = model.grid(left) if last else reader.place(left)
        said = reader(left, positions).float().log_softmax(1)
        known = known.index_copy(0, rows, joined(said, known[rows], stage) if number else stage.own * said)
        tokens = tokens.index_add(0, rows, torch.full_like(rows, positions.shape[1]))
        macs = macs.index_add(0, rows, torch.full_like(rows, stage.macs))
        confidence = known.softmax(1).amax(1)
        threshold = 0.0 if last else stage.threshold if until is None else until
        stays = confidence[rows] < threshold
        done = torch.ones(len(images), dtype=torch.bool, device=images.device).index_copy(0, rows[stays], ~stays[stays])
        yield Step(known, confidence, tokens, macs, done, rows, positions)
        rows = rows[stays]
        if not len(rows):
            return


def reader_of(
    model: "SpotViT",
    stage: Stage,
    *,
    grid: bool,
    base: bool = False,
    prior: str | None = None,
    images: Tensor | None = None,
) -> "TokenModel":
    """What a stage runs: the model with so many tokens of these images, or on its grid, merging as the stage says.

    base: on the grid, the ViT that the model was retrofitted from. prior: off it, where tokens go.
    """
    from spot.models.tome import ToMe  # here, because it is made of a SpotViT, which has a `look`

    if grid:
        full = model.base_vit() if base else model
        return ToMe(full.suited(len(model.grid())), r=stage.merged) if stage.merged else full
    few = model.placing(stage.tokens, prior, images)
    return ToMe(few, r=stage.merged, own_placement=True) if stage.merged else few


def joined(said: Tensor, known: Tensor, stage: Stage) -> Tensor:
    """What a stage says (B, classes), and what was known before, as log-probabilities up to a constant."""
    return stage.own * said + stage.earlier * known
