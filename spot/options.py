"""Options that command-line verbs share, and the dataclasses of options for use in Python.

A verb declares `weights: options.Weights = None`. `LoadingOptions` and `EvaluateOptions` select images and comparisons.
`TrainOptions` are a training run's options besides its recipe; only `data`, `split`, `limit`, `leave_out` and
`accumulate` change its outcome. `LearnOptions` are for `spot learn`, `GlimpseOptions` for `spot learn --look glimpses`.
This module imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from spot.errors import InputError, unknown

MODEL = "vit-ti"  # the default model of predict, search and embed: a retrofitted ViT-Ti/16
NAME = "a name that spot models lists, a folder or file that spot saved, a hub id, or a timm name"

Model = Annotated[str, arg(help=f"the model: {NAME}")]
ModelArgument = Annotated[Positional[str], arg(metavar="MODEL", help=f"the model: {NAME}")]
ModelArguments = Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL ...", help=f"models: {NAME}")]
Photos = Annotated[
    Positional[tuple[str, ...]], arg(metavar="IMAGE ...", help="image files, folders of images, or quoted patterns")
]
Weights = Annotated[Path | None, arg(help="a local file with the timm model's weights, instead of a download")]
DATA = (
    "a folder with one sub-folder per class, ImageNet's root, a timm data set, or built-in images: scenes, "
    "needle (large scenes with a small object) or needle:256 (of 256 pixels)"
)
Data = Annotated[str, arg(help=DATA)]
DataInstead = Annotated[str | None, arg(help=f"instead of images: {DATA}")]
DataArgument = Annotated[
    Positional[str],
    arg(metavar="DATA", help='a folder of images, with or without classes, a timm data set, or "scenes"'),
]
PRIORS = (
    "uniform", "gaussian", "sobol", "isotropic", "center", "boundary", "center-authors", "boundary-authors",
    "salient", "salient-distinct", "salient-soft", "focus", "background", "learned",
)  # fmt: skip
Prior = Annotated[
    str | None,
    arg(help=f"where tokens go: {', '.join(PRIORS)}, or the file of a policy. Default: the model's own prior"),
]
Scale = Annotated[
    float | Literal["auto"] | None,
    arg(
        help="window size: the distance between samples in pixels, or auto. Default: the model's own (auto for a "
        "shipped retrofit, else 1)"
    ),
]
Seed = Annotated[int, arg(help="random seed; each image also uses its own name")]
Split = Annotated[str, arg(help="val, train or test, if the data has several splits")]
SkipUnreadable = Annotated[bool, FlagCreatePairsOff, arg(help="skip images that cannot be read")]
Fits = Literal["crop", "whole", "squash", "full"]
FIT = (
    "how an image becomes the model's input: the middle square, the whole image with its aspect ratio, "
    "squashed to a square, or all pixels"
)
Fit = Annotated[Fits, arg(help=FIT)]
FitOrDefault = Annotated[Fits | None, arg(help=f"{FIT}. Default: crop, or all pixels for a model that finds places")]
Json = Annotated[Path | None, arg(help="write the table with all settings to this file; - is standard output")]
Saliency = Annotated[
    str | None,
    arg(
        help="source of saliency maps for salient, focus and background: spectral (default), clipseg, "
        "clipseg:PROMPT, an .onnx file or a folder of maps"
    ),
]
Baseline = Literal[
    "plain", "resize", "patch-dropout", "tome", "tome-cost", "tome-floor", "merged", "merged-learned", "elastic"
]
Baselines = Annotated[tuple[Baseline, ...], arg(metavar="NAME ...")]


def refuse_unknown_prior(prior: object) -> None:
    """Refuse a prior, or a tuple of priors, that is neither a known name nor a policy's file."""
    for name in prior if isinstance(prior, tuple) else (prior,):
        if isinstance(name, str) and name not in PRIORS and not name.endswith(".safetensors"):
            raise unknown("prior", name, PRIORS, hint="or give the file of a policy that spot learn wrote")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Which images of a data set to use."""

    split: str = "val"
    """val, train or test, if the data has several splits"""
    data_root: Path | None = None
    """folder of a timm data set's files"""
    limit: int | None = None
    """maximum number of images, evenly spread over the classes"""
    skip_unreadable: Annotated[bool, FlagCreatePairsOff] = False
    """skip images that cannot be read"""

    def opening(self) -> dict[str, Any]:
        """The options as arguments of `spot.data.images.open_data`."""
        unreadable = "skip" if self.skip_unreadable else "stop"
        return {"split": self.split, "root": self.data_root, "limit": self.limit, "unreadable": unreadable}


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(ImageOptions):
    """Which images of a data set to use, and how to load them."""

    batch_size: int = 64
    """images per batch; changes the speed only"""
    workers: int | None = None
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

    prior: tuple[str, ...] = ()
    """where tokens go: priors (spot predict --help lists them) or files of policies. Default: the model's own"""
    tokens: tuple[int, ...] = ()
    """numbers of tokens. Default: the model's own"""
    seeds: int = 1
    """number of seeds to average over; priors that are not random are measured once"""
    placements: tuple[Path, ...] = ()
    """placements files of spot search"""
    saliency: Saliency = None
    baseline: Baselines = ()
    """baselines to measure at the same budgets: plain (the timm model itself), resize, patch-dropout, tome, tome-cost,
    tome-floor, merged, merged-learned, elastic"""
    glimpses: tuple[int, ...] = ()
    """for models of spot learn --look glimpses: numbers of places to classify. Default: the trained number"""
    knn: Path | None = None
    """labelled images, or a bank file: also measure the kNN accuracy of the features"""
    k: int = 20
    """number of neighbours for kNN"""
    temperature: float = 0.07
    """temperature of the kNN votes; smaller values favour nearer neighbours"""
    cache: Path | None = None
    """folder for kNN banks. Default: spot/knn in the user's cache"""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Where images come from, where results go, and how to compute."""

    data: str
    """a folder of images, a timm data set, scenes or needle"""
    out: Path
    """folder for the log, the checkpoints and the trained model"""
    split: str = "train"
    """which split of the data, if it has several"""
    limit: int | None = None
    """maximum number of training images"""
    leave_out: Path | None = None
    """a file with images to exclude from training: one path per line, relative to the data's root"""
    val: str | None = None
    """labelled images for validation after every epoch"""
    val_limit: int | None = 500
    """maximum number of validation images"""
    accumulate: int = 1
    """backward passes per step, to fit the batch into memory"""
    workers: int = 0
    """processes that read images"""
    checkpoint_minutes: float = 5.0
    """minutes between checkpoints"""
    tracker: str | None = None
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
    """width of a centred Gaussian that replaces the targets' mean, as a fraction of the side; 0 for none"""
    power: float = 1.5
    """the predicted map is raised to this power; values above 1 make it narrower"""
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
