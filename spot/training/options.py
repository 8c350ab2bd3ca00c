"""What a training run is given beside its recipe: where images come from, where results go, and how to compute.

Only `data`, `limit`, `leave_out`, `teacher` and `accumulate` have a bearing on the outcome. These are also the
options that retrofit, pretrain and finetune share; those from `set` on say how a run begins (spot.training.run.begin).
`Learning` is how `spot learn` trains a policy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from spot.data.difficulty import difficulty_of
from spot.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where images come from, where results go, and how to compute."""

    data: str
    """a folder of images, a timm data set's name, scenes or needle"""
    out: Path
    """folder for log, checkpoints and the trained model"""
    split: str = "train"
    """which part of the data, where it is divided"""
    limit: int | None = None
    """train on at most so many images"""
    leave_out: Path | None = None
    """a file that names images never to train on, one a line, as paths below the data's root"""
    teacher: str | None = None
    """distil: a saved model that teaches; by default the ViT that a delta was made from, or the model as it was"""
    cache: Path | None = None
    """folder in which runs share fixed views (recipe field views); by default the run's own, removed in the end"""
    val: str | None = None
    """labelled images to measure accuracy on after every epoch"""
    val_limit: int | None = 500
    """at most so many of them"""
    accumulate: int = 1
    """backward passes per step, to fit the batch into memory"""
    workers: int = 0
    """processes that read images"""
    checkpoint_minutes: float = 5.0
    """how much work an interruption may cost"""
    tracker: str | None = None
    """tensorboard, wandb or another of accelerate's"""
    set: Annotated[tuple[str, ...], arg(metavar="FIELD=VALUE")] = ()
    """recipe fields to change, such as lr=1e-4 epochs=5"""
    fresh: Annotated[tuple[str, ...] | None, arg(metavar="[OPTION=VALUE ...]")] = None
    """start from new weights, with timm's options for the model, such as img_size=64 depth=6"""
    weights: Path | None = None
    """a file with the timm model's weights, instead of downloading them"""
    dry_run: bool = False
    """show recipe, parameter groups, steps, time and memory; train nothing"""
    json: Path | None = None
    """write what the dry run says to this file"""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise InputError(f"images are read by 0 or more processes besides this one, got workers={self.workers}")

    @property
    def scenes(self) -> bool:
        """Whether the images are the built-in scenes."""
        return difficulty_of(self.data) is not None


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How a policy is trained; see spot.training.learn."""

    look: Literal["thumbnail", "tokens"] = "thumbnail"
    """a small network on a shrunk image, or the model's own first blocks on large tokens"""
    side: int | None = None
    """pixels of the thumbnail, or large tokens, along each side"""
    target: str = "attention"
    """what the map is to be: attention, occlusion, trials, oracle, or an .onnx file of a saliency network"""
    center: float = 0.4
    """width, in sides of the image, of the pull to the middle that replaces what targets have in common; 0 for none"""
    tokens: int = 25
    """with how many tokens trials and searches are made"""
    power: float = 1.5
    """in the end the map is raised to this power; above 1 it is narrower, for a look is less sure than its target"""
    strength: float = 0.9
    """the share of importance, against even coverage, with very few tokens"""
    sizes: float = 0.0
    """0 leaves the size of windows to the model; 1 makes each as large as its share of the image"""
    views: int = 6
    """random crops of each photograph that the target is computed for, beside the whole of it; scenes need none"""
    epochs: int = 8
    """how often each image and each of its crops is seen"""
    batch: int = 64
    """images a step"""
    lr: float = 5e-3
    """learning rate at its highest"""
    weight_decay: float = 0.1
    """of AdamW"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """in which targets are computed; bf16 is about twice as fast where the processor has it"""
    seed: int = 0
    """of first weights, order and crops"""
