"""Options that verbs on data share, and those of a comparison: as the command line reads them and Python gives them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from spot.errors import InputError

Saliency = Annotated[
    str | None,
    arg(
        help="for salient, focus and background: spectral (the default), clipseg, clipseg:PROMPT, an .onnx file "
        "or a folder of maps"
    ),
]
Baseline = Literal[
    "plain", "resize", "patch-dropout", "tome", "tome-cost", "tome-floor", "merged", "merged-learned", "elastic"
]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which images of some data."""

    split: str = "val"
    """val, train or test, where the data has several"""
    data_root: Path | None = None
    """where a timm data set keeps its files"""
    limit: int | None = None
    """at most so many images, evenly spread over the classes"""
    skip_unreadable: Annotated[bool, FlagCreatePairsOff] = False
    """go on without images that cannot be read"""

    def opening(self) -> dict[str, Any]:
        """What `spot.data.images.open_data` calls them."""
        unreadable = "skip" if self.skip_unreadable else "stop"
        return {"split": self.split, "root": self.data_root, "limit": self.limit, "unreadable": unreadable}


@dataclass(frozen=True, kw_only=True)
class Loading(Choice):
    """Which images of some data, and how they are read."""

    batch_size: int = 64
    """images at a time; changes speed only"""
    workers: int | None = None
    """processes that read images; by default one less than there are cores, at most 8"""

    def readers(self) -> dict[str, Any]:
        """What `spot.data.loader.loader` calls them."""
        from spot.data.loader import available_workers

        workers = available_workers() if self.workers is None else self.workers
        if workers < 0:
            raise InputError(f"images are read by 0 or more processes besides this one, got workers={workers}")
        return {"batch_size": self.batch_size, "workers": workers}


@dataclass(frozen=True, kw_only=True)
class Comparing(Loading):
    """What `spot evaluate` compares, and on which images."""

    prior: tuple[str, ...] = ()
    """where tokens go; by default as the model says"""
    tokens: tuple[int, ...] = ()
    """budgets; by default the model's own"""
    seeds: int = 1
    """how many seeds to average over; priors that draw nothing are measured once"""
    placements: tuple[Path, ...] = ()
    """files with a placement for each image, as spot search writes them"""
    saliency: Saliency = None
    baseline: tuple[Baseline, ...] = ()
    """what one would use instead, at the same budgets; plain is the timm model itself"""
    anytime: bool = False
    """also let the model stop when sure, as spot calibrate chose"""
    knn: Path | None = None
    """labelled images, or a bank file, for k-nearest-neighbour accuracy of the features"""
    k: int = 20
    """how many neighbours vote"""
    temperature: float = 0.07
    """how much more a nearer neighbour's vote counts"""
    cache: Path | None = None
    """folder for kNN banks; by default spot/knn in the user's cache"""
