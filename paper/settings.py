"""Settings of a study: its images, their number, and how they are read. These are options of `python -m paper`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from spot.data.difficulty import difficulty_of
from spot.data.loader import available_workers
from spot.errors import InputError

SCENES = "scenes"


@dataclass(frozen=True)
class StudySettings:
    """Data and settings of a study; the defaults depend on the data."""

    data: str = SCENES
    """a folder of labelled images with one sub-folder per class, ImageNet's root, a timm data set, or "scenes" """
    split: str = ""
    """val, train or test; by default test scenes and val photographs"""
    root: Annotated[Path | None, arg(name="data-root")] = None
    """the folder of a timm data set's files"""
    tokens: tuple[int, ...] = ()
    """budgets, the smallest is the sparse one; by default about an eighth, a quarter, a half and all of the grid"""
    only: tuple[str, ...] = ()
    """measure only these placements (priors, classification, robustness), and add them to the rows of OUT/NAME.json"""
    seeds: int = 3
    """number of seeds for random placements"""
    limit: int | None = None
    """images for rows without a search; by default 1024 scenes, or all photographs"""
    oracle_limit: int | None = None
    """images for rows with a search; by default 512 scenes, or as many as --limit"""
    saliency: str = ""
    """spectral (the default for photographs), clipseg, an .onnx file or a folder of maps; for kNN with salient
    placements the folder also needs maps of the bank's images; scenes have object masks"""
    bank: str | None = None
    """labelled images for kNN; by default training scenes. Without one, photographs get no kNN"""
    bank_limit: int | None = None
    """the largest number of bank images, the same for each class; by default 1024 scenes, or all"""
    bank_keep: Path | None = None
    """a file with the bank images to use, one path per line, relative to the folder; by default all"""
    runs: Annotated[tuple[Path, ...], arg(name="run")] = ()
    """folders of training runs, whose logs `retrofit` shows; by default a small run on scenes"""
    batch_size: int = 64
    """images per batch; affects only speed"""
    workers: int = -1
    """processes that read images; by default the number of free cores, at most 8"""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise InputError(f"at least one seed is needed, got {self.seeds}")
        for name in ("limit", "oracle_limit", "bank_limit"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise InputError(f"the {name.replace('_', ' ')} must be at least one image, got {number}")
        limit = self.limit or (1024 if self.scenes else None)
        bank = self.bank or (self.data if self.scenes else None)
        chosen = {
            "split": self.split or ("test" if self.scenes else "val"),
            "tokens": tuple(sorted(set(self.tokens))),
            "limit": limit,
            "oracle_limit": self.oracle_limit or (min(512, limit or 512) if self.scenes else limit),
            "saliency": self.saliency or ("masks" if self.scenes else "spectral"),
            "bank": bank,
            "bank_limit": self.bank_limit or (1024 if bank is not None and difficulty_of(bank) else None),
            "workers": (0 if self.scenes else available_workers()) if self.workers < 0 else self.workers,
        }
        for name, value in chosen.items():
            object.__setattr__(self, name, value)

    @property
    def scenes(self) -> bool:
        """Whether the images are the built-in ones."""
        return difficulty_of(self.data) is not None
