"""Early exit: few tokens first, and more only for the images that need them.

    cascade = spot.Cascade.load("vit-ti")
    for step in cascade(images):                # an image stops at the calibrated thresholds
        step.logits, step.confidence            # the prediction for every image so far
        step.tokens, step.macs, step.done       # its cost so far, and which images are finished
    for step in cascade(images, until=0.8):     # an image stops at this confidence instead

A cascade is a list of stages. Each is a forward pass with more tokens than the one before, for the images that are
still in the batch; the last one has the whole grid. A stage may merge similar tokens between its blocks (ToMe). Its
log-probabilities are added to those of earlier stages, with weights that make the sum agree best with the dense ViT.
The confidence, the largest probability, thus estimates how likely the dense ViT predicts the same class. `spot
calibrate` (spot/evaluation/early_exit.py) chooses stages, weights and thresholds on unlabelled images.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spot.errors import InputError, check_kind
from spot.models.family import Source, at_budget, dense_model, hash_weights
from spot.models.loading import is_timm, load_source, unknown_model
from spot.models.shipped import CASCADE, find
from spot.models.spot_vit import SpotViT
from spot.models.tome import ToMe
from spot.models.wrappers import PlainViT, TokenModel, Wrapper
from spot.placement.priors import check_images
from spot.store import read_json, write_json
from spot.tokens.tokenizer import Tokenizer

FORMAT = 2


@dataclass(frozen=True)
class Stage:
    """One forward pass of a cascade."""

    tokens: int
    macs: int  # multiply-adds of this forward pass with its placement
    threshold: float = 0.0  # an image with this confidence is done; 0 for the last stage
    weight: float = 1.0  # of this stage's log-probabilities
    earlier_weight: float = 0.0  # of the sum over the stages before
    merged: tuple[int, ...] = ()  # number of similar tokens that each block merges away; empty: none

    @property
    def tokens_left(self) -> int:
        """The number of tokens after the last block."""
        return self.tokens - sum(self.merged)

    def add(self, log_probabilities: Tensor, earlier: Tensor) -> Tensor:
        """The weighted sum of the stage's log-probabilities (B, classes) and the sum of earlier stages."""
        return self.weight * log_probabilities + self.earlier_weight * earlier


class Step(NamedTuple):
    """The state of B images after a stage, which processed R of them."""

    logits: Tensor  # (B, classes), log-probabilities up to a constant
    confidence: Tensor  # (B,), the largest probability
    tokens: Tensor  # (B,) int64, total of all stages so far
    macs: Tensor  # (B,) int64, total of all stages so far
    done: Tensor  # (B,) bool
    rows: Tensor  # (R,) int64, the images that this stage processed
    positions: Tensor  # (R, N, 2 or 3), positions of their tokens


class Cascade(nn.Module):
    """Models of increasing budgets, with the confidence at which an image stops after each."""

    def __init__(
        self,
        source: Source,
        stages: Sequence[Stage],
        *,
        prior: str | None = None,
        calibration: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            source: builds the model of each stage; for a family the last stage is the original ViT.
            prior: placement in all stages but the last; by default the model's own.
            calibration: JSON values: its settings, and the results on the calibration images.
        """
        super().__init__()
        self.stages, self.prior, self.calibration = tuple(stages), prior, dict(calibration or {})
        self.name, self.hash = source.name, hash_weights(source)
        models = [
            stage_model(at_budget(source, stage.tokens, prior=prior), stage, grid=False) for stage in self.stages[:-1]
        ]
        self.models = nn.ModuleList([*models, stage_model(dense_model(source), self.stages[-1], grid=True)])
        self.eval()

    @property
    def budgets(self) -> tuple[int, ...]:
        """Tokens of each stage."""
        return tuple(stage.tokens for stage in self.stages)

    @classmethod
    def load(cls, name: str | Path, source: Source | None = None, *, weights: str | Path | None = None) -> "Cascade":
        """Load the cascade of a shipped retrofit by the model's name, or one from a file that `spot calibrate` wrote.

        Args:
            source: the model or family that the file was calibrated for; any other is refused.
            weights: a file with the timm model's weights, instead of a download.
        """
        path = Path(name)
        if path.suffix != ".json":
            file = find(name)
            path = file.with_suffix(CASCADE)
            if not file.exists() and not is_timm(str(name)):
                raise unknown_model(str(name))
            if not file.is_file() or not path.is_file():
                raise InputError(
                    f"{name} has no calibrated cascade; make one with spot calibrate, and give its .json file"
                )
            source = load_source(name, weights=weights) if source is None else source
        if source is None:
            raise InputError(f"the cascade in {path} needs the model it was calibrated for: Cascade.load(file, model)")
        about = read_json(path, "a cascade written by spot calibrate")
        try:
            if about["format"] != FORMAT:
                raise InputError(f"{path} is in format {about['format']!r}, not {FORMAT}; make it with spot calibrate")
            stages = [Stage(**{**each, "merged": tuple(each["merged"])}) for each in about["stages"]]
            cascade = cls(source, stages, prior=about["prior"], calibration=about["made"])
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged, or no cascade that spot calibrate wrote: {error}") from error
        if about["hash"] != cascade.hash:
            raise InputError(
                f"{path} was calibrated for other weights ({about['hash']}) than this model's ({cascade.hash}); "
                "make one for it with spot calibrate"
            )
        return cascade

    def save(self, path: str | Path) -> None:
        """Write stages and thresholds as JSON, without the model's weights."""
        about = {"format": FORMAT, "model": self.name, "hash": self.hash, "prior": self.prior}
        write_json(path, {**about, "made": self.calibration, "stages": [asdict(stage) for stage in self.stages]})

    def forward(self, images: Tensor, until: float | None = None) -> Iterator[Step]:
        """Images (B, C, H, W) → a Step after each stage; finished images leave the batch.

        until: the confidence at which an image stops at any stage, instead of the calibrated thresholds.
        """
        check_images(images)
        check_kind("until", until, float, int, type(None))
        if until is not None and not 0 < until <= 1:
            raise InputError(f"until is a confidence, above 0 and at most 1, got {until}")
        return self._steps(images, until)

    def _steps(self, images: Tensor, until: float | None) -> Iterator[Step]:
        models: list[Any] = list(self.models)
        total = images.new_zeros(len(images), models[-1].spot_vit.num_classes, dtype=torch.float32)
        tokens, macs = (torch.zeros(len(images), dtype=torch.int64, device=images.device) for _ in range(2))
        rows = torch.arange(len(images), device=images.device)
        for number, (stage, model) in enumerate(zip(self.stages, models, strict=True)):
            last = number + 1 == len(self.stages)
            positions, logits = predict_stage(model, images if len(rows) == len(images) else images[rows], last)
            total = total.index_copy(0, rows, stage.add(logits.float().log_softmax(1), total[rows]))
            tokens = tokens.index_add(0, rows, torch.full_like(rows, positions.shape[1]))
            macs = macs.index_add(0, rows, torch.full_like(rows, stage.macs))
            confidence = total.softmax(1).amax(1)
            threshold = 0.0 if last else stage.threshold if until is None else until
            stays = confidence[rows] < threshold
            done = torch.ones(len(images), dtype=torch.bool, device=images.device).index_fill(0, rows[stays], False)
            yield Step(total, confidence, tokens, macs, done, rows, positions)
            rows = rows[stays]
            if not len(rows):
                return


def stage_model(model: SpotViT, stage: Stage, *, grid: bool) -> TokenModel:
    """The model of a stage: with token merging if the stage has any; without, on the grid the plain ViT."""
    if any(stage.merged):
        return ToMe(model, stage.merged, own_placement=not grid)
    if not grid:
        return model
    return PlainViT(model) if type(model.tokenizer) is Tokenizer else Wrapper(model)


def predict_stage(model: TokenModel, images: Tensor, last: bool) -> tuple[Tensor, Tensor]:
    """The positions (B, N, 2 or 3) of a stage and its logits (B, classes); the last stage has the grid."""
    positions = model.place(images)
    return positions, model(images) if last else model(images, positions)
