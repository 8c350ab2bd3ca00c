"""Predictions per image, confidence intervals, and significance tests for rows that share images.

Outcomes are per image: bool (M,), or (S, M) for S seeds. Seeds share the same images: they reduce the
variance of an image's outcome, but do not enlarge the sample. All numbers are percentages, all intervals 95 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from spot.errors import InputError
from spot.evaluation.accuracy import CONFIDENCE, wilson
from spot.placement.files import Placements

MIN_IMAGES = 20  # the smallest number of images for a test
RESAMPLES = 2000  # of the bootstrap
NO_KNN = (
    "Rows without kNN need labelled images for a bank: --bank DIR (and, for salient and focus, their maps in "
    "--saliency)."
)


@dataclass(frozen=True)
class Predictions:
    """Whether one model was right about each of M images, in the order of the images' keys."""

    keys: list[str]
    right: Tensor  # (M,) bool
    knn: Tensor | None = None  # (M,) bool: whether kNN was right

    def on(self, keys: Sequence[str]) -> "Predictions":
        """The predictions for some of the images, in this order."""
        row = {key: number for number, key in enumerate(self.keys)}
        missing = next((key for key in keys if key not in row), None)
        if missing is not None:
            raise InputError(f"image {missing!r} was not measured; a comparison needs the same images")
        rows = torch.tensor([row[key] for key in keys], dtype=torch.int64)
        return Predictions(list(keys), self.right[rows], None if self.knn is None else self.knn[rows])


def accuracy_row(right: Tensor, name: str = "top1") -> dict[str, float | int | None]:
    """Accuracy in percent with Wilson interval, standard deviation over seeds, and number of images."""
    right = right.double().reshape(-1, right.shape[-1])
    per_seed = 100 * right.mean(1)
    mean = per_seed.mean().item()
    low, high = wilson(mean / 100, right.shape[1])
    std = per_seed.std().item() if len(per_seed) > 1 else None
    return {name: mean, "low": 100 * low, "high": 100 * high, "std": std, "images": right.shape[1]}


def predicted(placements: Placements, step: int = -1) -> Predictions:
    """Predictions of the searching model at a step of its search; step 0 is the prior."""
    keys = sorted(placements.keys)
    rows = placements.rows(keys)
    values = placements.values
    return Predictions(keys, values["predictions"][rows, step] == values["labels"][rows])


def stacked(predictions: Sequence[Predictions]) -> Tensor:
    """Whether each seed was right about each image, (S, M)."""
    return torch.stack([each.right for each in predictions])


def over_seeds(predictions: Sequence[Predictions]) -> dict[str, float | int | None]:
    """Accuracy and, if available, kNN accuracy over seeds, with intervals over images."""
    row = {"seeds": len(predictions), **accuracy_row(stacked(predictions))}
    votes = [each.knn for each in predictions if each.knn is not None]
    if votes:
        knn = accuracy_row(torch.stack(votes), "knn")
        row |= {"knn": knn["knn"], "knn_low": knn["low"], "knn_high": knn["high"], "knn_std": knn["std"]}
    return row


def difference(first: Tensor, second: Tensor, name: str = "delta") -> dict[str, float]:
    """Accuracy of second minus that of first on the same images, in points, with its test; name: of the difference.

    For one outcome per image, the interval is Agresti and Min's (2005) and p is McNemar's exact test. For
    several seeds, the interval is that of the mean difference and p is Wilcoxon's signed-rank test.
    """
    first, second = (right.double().reshape(-1, right.shape[-1]) for right in (first, second))
    count = first.shape[1]
    if count != second.shape[1]:
        raise InputError(f"a paired test needs the same images, got {count} and {second.shape[1]}")
    check_enough(count)
    change = second.mean(0) - first.mean(0)
    delta = change.mean().item()
    if len(first) == len(second) == 1:
        gained, lost = int((change > 0).sum()), int((change < 0).sum())
        low, high = _agresti_min(gained, lost, count)
        # McNemar's test: were changed pairs as likely to be gained as lost?
        p = stats.binomtest(gained, gained + lost).pvalue if gained != lost else 1.0
    else:
        half = CONFIDENCE * (change.std() / math.sqrt(count)).item()
        low, high = delta - half, delta + half
        p = wilcoxon(change)
    ends = {name: 100 * delta, f"{name}_low": 100 * low, f"{name}_high": 100 * high}
    return {**ends, "p" if name == "delta" else f"{name}_p": p}


def mean(values: Tensor) -> dict[str, float | int]:
    """The mean of one number per image with its bootstrap interval, the median, and Wilcoxon's test against 0.

    NaN are left out and counted.
    """
    known = values[~values.isnan()].double()
    check_enough(len(known))
    generator = torch.Generator().manual_seed(0)
    count = len(known)
    draws = [known[torch.randint(count, (count,), generator=generator)].mean() for _ in range(RESAMPLES)]
    low, high = torch.stack(draws).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    middle = {"mean": known.mean().item(), "median": known.median().item(), "low": low, "high": high}
    return {**middle, "p": wilcoxon(known), "images": count, "left_out": len(values) - count}


def wilcoxon(values: Tensor) -> float:
    """Two-sided p of the signed-rank test that values (M,) lie symmetrically around 0 (normal approximation)."""
    numbers = values.double().numpy()
    return float(stats.wilcoxon(numbers, method="asymptotic").pvalue) if numbers.any() else 1.0


def check_enough(count: int) -> None:
    """Refuse a test of too few images."""
    if count < MIN_IMAGES:
        hint = "give more with --limit and --oracle-limit"
        raise InputError(f"a test needs at least {MIN_IMAGES} images, got {count}; {hint}")


def _agresti_min(gained: int, lost: int, count: int) -> tuple[float, float]:
    """The interval of a paired difference of shares, with half an image added to each of the four cells."""
    total = count + 2
    delta = (gained - lost) / total
    spread = math.sqrt(((gained + lost + 1) / total - delta**2) / total)
    seen = (gained - lost) / count
    low, high = max(-1.0, delta - CONFIDENCE * spread), min(1.0, delta + CONFIDENCE * spread)
    return min(low, seen), max(high, seen)
