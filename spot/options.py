"""Options of the command line, each declared once, and the dataclasses of options for use in Python.

A verb declares `weights: options.Weights = None`. `LoadingOptions` and `EvaluateOptions` select images and comparisons.
`TrainOptions` are a training run's options besides its recipe; only `data`, `split`, `limit`, `leave_out` and
`accumulate` change its outcome. `LearnOptions` are for `spot learn`, `GlimpseOptions` for `spot learn --look glimpses`.
This module imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from tyro.conf import Positional, arg

from spot.errors import InputError, unknown

T = TypeVar("T")
EXPLAINED = arg(help_behavior_hint="")  # --help adds no "(default: None)", because the text describes it
Maybe = Annotated[T | None, EXPLAINED]
Several = Annotated[tuple[T, ...], EXPLAINED]
Flat = arg(name="")  # the fields of a dataclass as options without a prefix

MODEL = "vit-ti"  # the default model of predict, search and embed: a retrofitted ViT-Ti/16
NAME = "a name that spot models lists, a folder or file that spot saved, a hub id, or a timm name"
DATA = (
    "a folder with one sub-folder per class, ImageNet's root, a timm data set, or built-in images: scenes, "
    "needle (large scenes with a small object) or needle:256 (256 × 256 pixels)"
)
PRIORS = (
    "uniform", "gaussian", "sobol", "isotropic", "center", "boundary", "center-authors", "boundary-authors",
    "salient", "salient-distinct", "salient-soft", "focus", "background", "learned",
)  # fmt: skip

Model = Annotated[str, arg(help=f"the model: {NAME}")]
ModelArgument = Annotated[Positional[str], arg(metavar="MODEL", help=f"the model: {NAME}")]
ModelArguments = Annotated[Positional[Several[str]], arg(metavar="MODEL ...", help=f"models: {NAME}")]
Photos = Annotated[
    Positional[Several[str]], arg(metavar="IMAGE ...", help="image files, folders of images, or quoted patterns")
]
Weights = Annotated[Maybe[Path], arg(help="a local file with the timm model's weights, instead of a download")]
Data = Annotated[str, arg(help=DATA)]
DataInstead = Annotated[Maybe[str], arg(help=f"instead of images: {DATA}")]
Prior = Annotated[
    Maybe[str],
    arg(help=f"where tokens go: {', '.join(PRIORS)}, or the file of a policy. Default: the model's own prior"),
]
Scale = Annotated[
    Maybe[float | Literal["auto"]],
    arg(
        help="window size: the distance between samples in pixels, or auto. Default: the model's own (auto for a "
        "shipped retrofit, else 1)"
    ),
]
Seed = Annotated[int, arg(help="random seed; the draws of an image depend on the seed and its name")]
Split = Annotated[str, arg(help="val, train or test, if the data has several splits")]
Limit = Annotated[Maybe[int], arg(help="maximum number of images, evenly spread over the classes")]
LeaveOut = Annotated[
    Maybe[Path], arg(help="a file with images to exclude: one path per line, relative to the data's root")
]
SkipUnreadable = Annotated[bool, arg(help="skip images that cannot be read")]
Fit = Annotated[
    Maybe[Literal["crop", "whole", "squash", "full"]],
    arg(
        help="how an image becomes the model's input: the middle square, the whole image with its aspect ratio, "
        "squashed to a square, or all pixels. Default: crop; predict uses full for a model with a finder"
    ),
]
Json = Annotated[Maybe[Path], arg(help="write the table with all settings to this file; - is standard output")]
Saliency = Annotated[
    Maybe[str],
    arg(
        help="source of saliency maps for salient, focus and background: spectral, clipseg, clipseg:PROMPT, an .onnx "
        "file or a folder of maps. Default: the model's own, mostly spectral"
    ),
]
Baseline = Literal[
    "plain", "resize", "patch-dropout", "tome", "tome-cost", "tome-floor", "merged", "merged-learned", "elastic"
]
Baselines = Annotated[
    tuple[Baseline, ...],
    arg(
        metavar="NAME ...",
        help="baselines at the same budgets: plain (the timm model), resize, patch-dropout (N random patches), tome "
        "(merges until N tokens are left), tome-cost (until its blocks cost as much as N tokens), tome-floor (as "
        "tome-cost, with more merging in the first blocks), merged (places more windows and merges them at the cost of "
        "N), merged-learned (merged, with learned placement), elastic (shifted and rescaled patches)",
    ),
]


def check_prior(*names: str | None) -> None:
    """Refuse a prior that is neither a known name nor a policy's file, before torch is imported."""
    for name in names:
        if name is not None and name not in PRIORS and not name.endswith(".safetensors"):
            raise unknown("prior", name, PRIORS, hint="or give the file of a policy that spot learn wrote")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Which images of a data set to use."""

    split: Split = "val"
    data_root: Maybe[Path] = None
    """folder of a timm data set's files"""
    limit: Limit = None
    skip_unreadable: SkipUnreadable = False

    def opening(self) -> dict[str, Any]:
        """The options as arguments of `spot.data.images.open_data`."""
        return {"split": self.split, "root": self.data_root, "limit": self.limit, "skip": self.skip_unreadable}


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(ImageOptions):
    """Which images of a data set to use, and how to load them."""

    batch_size: int = 64
    """images per batch; changes the speed only"""
    workers: Maybe[int] = None
    """processes that read images. Default: the number of cores minus one, at most 8"""

    def readers(self) -> dict[str, Any]:
        """The options as arguments of `spot.data.loader.loader`."""
        from spot.data.loader import available_workers

        workers = available_workers() if self.workers is None else self.workers
        if workers < 0:
            raise InputError(f"workers must be at least 0, got {workers}")
        return {"batch_size": self.batch_size, "workers": workers}


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(LoadingOptions):
    """The comparisons of `spot evaluate`, and their images."""

    prior: Several[str] = ()
    """where tokens go: priors (spot predict --help lists them) or files of policies. Default: the model's own"""
    tokens: Several[int] = ()
    """numbers of tokens. Default: the model's own"""
    seeds: int = 1
    """number of seeds to average over; priors that are not random are measured once"""
    placements: Several[Path] = ()
    """placements files of spot search"""
    saliency: Saliency = None
    baseline: Annotated[Baselines, EXPLAINED] = ()
    glimpses: Several[int] = ()
    """for models of spot learn --look glimpses: numbers of places to classify. Default: the trained number"""
    knn: Maybe[Path] = None
    """labelled images, or a file of spot embed: also measure the kNN accuracy of the features"""
    k: int = 20
    """number of neighbours for kNN"""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Where images come from, where results go, and how to compute."""

    data: str
    """a folder of images, a timm data set, scenes or needle"""
    out: Path
    """folder for the log, the checkpoints and the trained model"""
    split: Split = "train"
    limit: Limit = None
    leave_out: LeaveOut = None
    val: Maybe[str] = None
    """labelled images for validation after every epoch"""
    val_limit: int | None = 500
    """maximum number of validation images"""
    accumulate: int = 1
    """backward passes per step, to fit the batch into memory"""
    workers: int = 0
    """processes that read images"""
    checkpoint_minutes: float = 5.0
    """minutes between checkpoints"""
    tracker: Maybe[str] = None
    """tensorboard, wandb or another tracker of accelerate"""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise InputError(f"workers must be at least 0, got {self.workers}")


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """How a policy is trained; see spot.training.learn."""

    side: int = 32
    """side of the policy's input thumbnail, in pixels"""
    target: str = "attention"
    """the map to learn: attention of the dense ViT, or an .onnx file of a saliency network"""
    center: float = 0.4
    """replace the targets' mean by a centred Gaussian of this width, as a fraction of the side; 0 keeps the mean"""
    views: int = 6
    """random crops per photograph, in addition to the whole image; not for scenes"""
    epochs: int = 8
    """number of epochs over all images and crops"""
    batch: int = 64
    """images per step"""
    lr: float = 5e-3
    """peak learning rate"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """precision of the targets; bf16 is about twice as fast if the processor supports it"""
    seed: int = 0
    """random seed"""


@dataclass(frozen=True, kw_only=True)
class GlimpseOptions:
    """How to train a model to find and classify objects in large pictures."""

    tokens: int = 16
    """number of tokens on each place"""
    glimpses: int = 3
    """number of places to classify per picture; evaluate and predict can use another number"""
    longest: int = 680
    """longer side of the finder's input, in pixels"""
    candidates: int = 40
    """number of candidates for the finder's second stage; 0 trains without a second stage"""
    steps: int = 2400
    """training steps of the finder; its second stage uses 5 / 12 of this number"""
    epochs: int = 8
    """epochs of fine-tuning the model on glimpses; 0 fits only its head"""
    none: str = "none"
    """the class of pictures without an object, if there is one"""
    rounds: int = 2
    """without boxes: number of times to retrain the finder on the places found so far"""
    seed: int = 0
    """random seed"""
