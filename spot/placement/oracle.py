"""Oracle search: positions optimised by gradient through a frozen model (paper, "SPoT-ON").

`search` takes any `model(images, positions) -> logits (B, classes)` that is differentiable in positions. From initial
positions (B, N, 2) it takes a few gradient steps on an objective. Images are optimised independently: the objective is
summed over them, and the optimisers keep their state per coordinate.

An objective maps logits (B, classes) and a target to one value per image, which is minimised. To add one, pass a
function of that signature, or list it in OBJECTIVES.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from spot.errors import InputError, check_kind, unknown
from spot.placement.priors import check_images, draw_rows, omega
from spot.placement.sizes import from_variables, to_variables, variable_limits
from spot.tokens.positions import COLUMNS, check_positions

Model = Callable[[Tensor, Tensor], Tensor]
Objective = Callable[[Tensor, Any], Tensor]


def descent(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the label."""
    return F.cross_entropy(logits, labels, reduction="none")


def ascent(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative cross-entropy: an adversarial search."""
    return -F.cross_entropy(logits, labels, reduction="none")


def entropy(logits: Tensor, target: None = None) -> Tensor:
    """Entropy of the prediction, in nats. Needs no label."""
    log = logits.log_softmax(-1)
    return -(log.exp() * log).sum(-1)


def agreement(logits: Tensor, dense: Tensor) -> Tensor:
    """KL divergence from the dense model's prediction, given as logits (B, classes). Needs no label."""
    goal = dense.log_softmax(-1)
    return (goal.exp() * (goal - logits.log_softmax(-1))).sum(-1)


OBJECTIVES: dict[str, Objective] = {
    "descent": descent,
    "ascent": ascent,
    "obfuscate": descent,  # with wrong labels, which search() draws
    "entropy": entropy,
    "agree": agreement,
}
LABELLED = ("descent", "ascent", "obfuscate")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


KINDS: dict[str, tuple[type, ...]] = {  # types of the settings below
    "steps": (int,), "lr": (int, float), "optimizer": (str,), "weight_decay": (int, float), "project": (bool,),
    "grid": (tuple, type(None)), "snap": (str,), "mixed_precision": (bool,),
}  # fmt: skip


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search. PRESETS contains the paper's."""

    steps: int = 5  # at least 1; the model is called steps + 1 times
    lr: float = 3e-3  # in fractions of the image: with Adam a coordinate moves by at most about this much per step
    objective: str | Objective = "descent"  # a name in OBJECTIVES, or a function
    optimizer: str = "adam"  # a name in OPTIMIZERS
    weight_decay: float = 0.0  # pulls to the upper left corner, (0, 0)
    project: bool = True  # keep positions in the paper's Ω, between the centres of the outermost pixels
    grid: tuple[int, int] | None = None  # rows and columns of a grid for the result
    # With a grid, "end" searches off the grid and snaps the final positions to the nearest cells (the paper's grid
    # rows). "every-step" evaluates the model on the nearest cells, and applies their gradient to the free positions.
    snap: Literal["end", "every-step"] = "end"
    mixed_precision: bool = False  # run the model under bfloat16 autocast; positions stay float32

    def __post_init__(self) -> None:
        for name, kinds in KINDS.items():
            check_kind(f"the search's {name}", getattr(self, name), *kinds)
        if not isinstance(self.objective, str) and not callable(self.objective):
            raise InputError(f"objective must be a name or a function of logits and labels, got {self.objective!r}")
        for name, known in (("objective", OBJECTIVES), ("optimizer", OPTIMIZERS), ("snap", ("end", "every-step"))):
            value = getattr(self, name)
            if isinstance(value, str) and value not in known:
                raise unknown(name, value, known)
        if self.steps < 1:
            raise InputError(f"a search takes at least 1 step, got {self.steps}")
        if not 0 < self.lr < math.inf:
            raise InputError(f"lr must be a positive number, in fractions of the image per step, got {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay must be a number of at least 0, got {self.weight_decay}")
        if self.grid is not None and ([type(side) for side in self.grid] != [int, int] or min(self.grid) < 1):
            raise InputError(f"grid must be (rows, columns), at least 1 row and 1 column, got {self.grid}")

    @property
    def labelled(self) -> bool:
        """Whether the objective needs labels."""
        return self.objective in LABELLED

    def changed(self, **changes: Any) -> "SearchSettings":
        """A copy with changed settings. None keeps the current value."""
        for name in changes:
            if name not in self.__dataclass_fields__:
                raise unknown("setting of a search", name, self.__dataclass_fields__)
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def as_json(self) -> dict[str, Any]:
        """All settings except the objective, for files."""
        return {name: value for name, value in asdict(self).items() if name != "objective"}


PRESETS: dict[str, SearchSettings] = {
    "paper": SearchSettings(),
    "paper-long": SearchSettings(steps=10, lr=1e-2),
    # The sparse prediction then matches the dense one on 9 of 10 photographs with 25 tokens.
    "agree": SearchSettings(steps=20, lr=1e-2, objective="agree"),
    # The authors' published code: weight decay pulls to the upper left corner, and tokens may leave the image.
    "authors": SearchSettings(optimizer="adamw", weight_decay=1e-2, project=False),
}


class SearchResult(NamedTuple):
    """All steps of a search; step 0 has the initial positions."""

    trajectory: Tensor  # (B, steps + 1, N, 2), or 3 with scales
    losses: Tensor  # (B, steps + 1), the objective; for ascent the negative cross-entropy
    logits: Tensor  # (B, steps + 1, classes)
    best_step: Tensor  # (B,), the step with the lowest objective; with a grid, among the steps on it
    target: Tensor | None  # of the objective: labels, wrong labels, dense logits or None

    def __repr__(self) -> str:
        images, steps, tokens = self.trajectory.shape[:3]
        first, last = (self.losses[:, step].mean().item() for step in (0, -1))
        return f"SearchResult({images} images, {tokens} tokens, {steps - 1} steps, mean loss {first:.3f} → {last:.3f})"

    @property
    def positions(self) -> Tensor:
        """The final positions (B, N, 2)."""
        return self.trajectory[:, -1]

    @property
    def best(self) -> Tensor:
        """The positions (B, N, 2) of each image's best step."""
        return self.trajectory[torch.arange(len(self.best_step), device=self.best_step.device), self.best_step]


def search(
    model: Model,
    images: Tensor,
    labels: Tensor | None,
    positions: Tensor,
    settings: SearchSettings | None = None,
    *,
    dense: Tensor | None = None,
    generator: Generator | None = None,
    keys: Sequence[str] | None = None,
    seed: int = 0,
    max_batch: int | None = None,
    **changes: Any,
) -> SearchResult:
    """Move positions (B, N, 2) along the gradient of an objective through a frozen model.

    With a third column, (B, N, 3), the logarithms of the window scales are optimised too. Regions, (B, N, 7), stay
    fixed; use `Glimpsing` (spot/placement/glimpses.py) to move whole glimpses.

    The model is called `steps + 1` times, in evaluation mode and without parameter gradients (see `frozen`).

        search(model, images, labels, positions)
        search(model, images, labels, positions, PRESETS["paper-long"], objective="ascent")

    Args:
        model: any callable of images (B, C, H, W) and positions; returns logits (B, classes).
        images: the model's input.
        labels: class indices (B,), or None for an objective without labels.
        positions: initial positions; (y, x) as a fraction of height and width.
        settings, changes: see SearchSettings; changes replace single settings.
        dense: target logits (B, classes) of "agree". Default: those of a SpotViT on its own grid.
        generator: draws the wrong labels of "obfuscate".
        keys, seed: instead of a generator: names of the images; each wrong label then depends only on (seed, key).
        max_batch: maximum number of images to search at a time; memory grows with this instead of B.
    """
    check_kind("settings", settings, SearchSettings, type(None), advice="such as PRESETS['paper']")
    settings = (settings or SearchSettings()).changed(**changes)
    if not callable(model):
        raise InputError(f"a model is a function of images and positions, got {type(model).__name__}")
    check_kind("max_batch", max_batch, int, type(None))
    if max_batch is not None and max_batch < 1:
        raise InputError(f"max_batch must be at least 1 image, got {max_batch}")
    _check(model, images, labels, positions, dense, settings.objective)
    if max_batch is not None and max_batch < len(images):
        parts = []
        for start in range(0, len(images), max_batch):
            rows = slice(start, start + max_batch)
            given: Any = (None if each is None else each[rows] for each in (images, labels, positions, dense, keys))
            some, classes, places, goal, names = given
            options: dict[str, Any] = {"dense": goal, "generator": generator, "keys": names, "seed": seed}
            parts.append(search(model, some, classes, places, settings, **options))
        joined: Any = (None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True))
        return SearchResult(*joined)

    def prepared(column: Tensor | None, dtype: torch.dtype = torch.float32) -> Any:
        if column is None:
            return None
        column = column.detach().to(images.device, dtype)
        return column.clone() if column.is_inference() else column  # autograd cannot save those

    wrong = partial(wrong_labels, generator=generator, keys=keys, seed=seed)
    with frozen(model), torch.inference_mode(False), torch.enable_grad():
        columns = prepared(images, images.dtype), prepared(positions), prepared(labels, torch.int64), prepared(dense)
        return _search(model, settings, wrong, *columns)


def _search(
    model: Model,
    settings: SearchSettings,
    wrong: Callable[[Tensor, int], Tensor],
    images: Tensor,
    positions: Tensor,
    labels: Tensor | None,
    dense: Tensor | None,
) -> SearchResult:
    """Search with a frozen model and checked arguments. wrong: draws labels for "obfuscate"; see `wrong_labels`."""
    objective, steps, grid = settings.objective, settings.steps, settings.grid

    def predict(positions: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=settings.mixed_precision):
            logits = model(images, positions)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(images):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(f"the model must return logits of shape ({len(images)}, classes), got {got}")
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    loss_of = OBJECTIVES[objective] if isinstance(objective, str) else objective
    target = labels
    if objective == "agree":
        with torch.no_grad():
            target = predict(model.grid(images)) if dense is None else dense  # type: ignore[attr-defined]
    window = getattr(model, "patch_size", None)
    largest = 4.0 if window is None else max(images.shape[-2:]) / window
    low, high = variable_limits(*omega(images), positions, largest)
    variables = to_variables(positions).clamp(low, high) if settings.project else to_variables(positions)
    optimizer = OPTIMIZERS[settings.optimizer]([variables], lr=settings.lr, weight_decay=settings.weight_decay)
    trajectory, losses, outputs = [], [], []
    for step in range(steps + 1):
        last = step == steps
        on_grid = grid if last or settings.snap == "every-step" else None
        here = variables.clone() if on_grid is None else snapped(variables, on_grid)
        with torch.set_grad_enabled(not last):
            logits = predict(from_variables(here.requires_grad_(not last)))
            if step == 0 and labels is not None and settings.labelled:
                check_labels(labels, logits.shape[1])
                if objective == "obfuscate":
                    target = wrong(labels, logits.shape[1])
            if objective == "agree" and target is not None and target.shape != logits.shape:
                raise InputError(f"dense must be logits of shape {tuple(logits.shape)}, got {tuple(target.shape)}")
            loss = loss_of(logits, target)
        _check_loss(loss, len(images), step)
        trajectory.append(from_variables(here.detach()))
        losses.append(loss.detach())
        outputs.append(logits.detach())
        if not last:
            variables.grad = _gradient(loss, here)
            optimizer.step()
            variables[..., 3:] = positions[..., 3:]  # weight decay would move regions
            if settings.project:
                variables.clamp_(low, high)
    first = 0 if grid is None or settings.snap == "every-step" else steps  # the first step on the grid
    best_step = torch.stack(losses[first:], 1).argmin(1) + first
    return SearchResult(torch.stack(trajectory, 1), torch.stack(losses, 1), torch.stack(outputs, 1), best_step, target)


def snapped(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """The centre of the (rows, columns) grid cell nearest to each position (..., 2)."""
    cells = positions.new_tensor(grid)
    index = (positions[..., :2].detach() * cells).floor().clamp(cells.new_zeros(2), cells - 1)
    return torch.cat([(index + 0.5) / cells, positions[..., 2:].detach()], -1)


def wrong_labels(
    labels: Tensor,
    classes: int,
    generator: Generator | None = None,
    keys: Sequence[str] | None = None,
    seed: int = 0,
) -> Tensor:
    """Draw, for each label (B,), one of the other classes uniformly: from the generator, or from (seed, key)."""
    if classes < 2:
        raise InputError("wrong labels need a model with at least two classes, this one has one")

    def draw(rows: slice, generator: Generator | None) -> Tensor:
        # One random number per image, in order, so that max_batch does not change the labels.
        return (torch.rand(len(labels[rows]), generator=generator, dtype=torch.float64) * (classes - 1)).long()

    names = None if keys is None else [f"label of {key}" for key in keys]
    wrong = draw_rows(draw, len(labels), generator, names, seed).to(labels.device)
    return wrong + (wrong >= labels)


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that are not among the model's classes."""
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise InputError(f"labels must be between 0 and {classes - 1}, the model's classes, got {outside[0].item()}")


@dataclass
class _FrozenModule:
    """The state of a module before it was frozen, and the number of active `frozen` contexts."""

    training: bool
    trained: list[nn.Parameter]  # its own parameters with gradients
    contexts: int = 0


_FROZEN: dict[nn.Module, _FrozenModule] = {}
_LOCK = Lock()  # held only while modules are being frozen or restored


@contextmanager
def frozen(*models: Any) -> Iterator[None]:
    """A context manager that puts modules in evaluation mode and disables parameter gradients.

    Several threads may freeze one module; the last one to exit restores it. Other callables are ignored.
    """
    modules = {part for model in models if isinstance(model, nn.Module) for part in model.modules()}
    with _LOCK:
        for module in modules:
            trained = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
            _FROZEN.setdefault(module, _FrozenModule(module.training, trained)).contexts += 1
            module.training = False
            for parameter in trained:
                parameter.requires_grad_(False)
    try:
        yield
    finally:
        with _LOCK:
            for module in modules:
                before = _FROZEN[module]
                before.contexts -= 1
                if not before.contexts:
                    del _FROZEN[module]
                    module.training = before.training
                    for parameter in before.trained:
                        parameter.requires_grad_(True)


def _gradient(loss: Tensor, positions: Tensor) -> Tensor:
    gradient = None
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), positions, allow_unused=True)
    if gradient is None:
        raise InputError(
            "the model gives no gradient to positions; its logits must be a differentiable function of them"
        )
    return gradient


def _check(
    model: Model, images: Tensor, labels: Tensor | None, positions: Tensor, dense: Tensor | None, objective: Any
) -> None:
    check_images(images)
    check_positions(positions)
    check_kind("labels", labels, Tensor, type(None))
    check_kind("dense", dense, Tensor, type(None))
    count = len(images)
    if not count:
        raise InputError(f"images must have shape (B, C, H, W), with B at least 1, got {tuple(images.shape)}")
    if positions.ndim != 3 or positions.shape[-1] not in COLUMNS or len(positions) != count:
        raise InputError(f"positions must have shape ({count}, N, 2), got {tuple(positions.shape)}")
    if not (positions[..., 2:3] > 0).all():
        raise InputError("the third number of a position is a window's scale and must be above 0")
    if labels is None and objective in LABELLED:
        raise InputError(f"objective {objective!r} needs labels; without them use 'agree' or 'entropy'")
    if labels is not None and (tuple(labels.shape) != (count,) or labels.dtype not in INTEGERS):
        raise InputError(
            f"labels must have shape ({count},), one integer per image, got {tuple(labels.shape)}, {labels.dtype}"
        )
    if objective == "agree" and dense is None and not hasattr(model, "grid"):
        raise InputError("objective 'agree' needs dense logits to agree with; pass dense=(B, classes)")
    if objective == "agree" and dense is not None and (dense.ndim != 2 or len(dense) != count):
        raise InputError(f"dense must be logits of shape ({count}, classes), got {tuple(dense.shape)}")


def _check_loss(loss: Tensor, count: int, step: int) -> None:
    if loss.shape != (count,):
        raise InputError(f"an objective returns one value per image, ({count},), got {tuple(loss.shape)}")
    if not loss.isfinite().all():
        image = (~loss.isfinite()).nonzero()[0].item()
        raise InputError(f"the objective of image {image} is not finite at step {step}; look at the image")


# A control: random moves instead of a search (not in the paper)


def moved_at_random(
    start: Tensor, end: Tensor, size: tuple[int, int], generator: Generator | None = None, tries: int = 8
) -> Tensor:
    """Move each token of `start` in a random direction, by its distance in pixels to `end`.

    For a token that would leave the image, other directions are tried; after the last try it is clamped.
    """
    shape = start.new_tensor(size)
    low, high = 0.5 / shape, 1 - 0.5 / shape
    distance = ((end - start)[..., :2] * shape).norm(dim=-1, keepdim=True)
    places, outside = start[..., :2], torch.ones(start.shape[:-1], dtype=torch.bool, device=start.device)
    for _ in range(tries):
        angle = 2 * math.pi * torch.rand(start.shape[:-1], generator=generator).to(start.device)
        move = distance * torch.stack([angle.sin(), angle.cos()], -1)
        places = torch.where(outside[..., None], start[..., :2] + move / shape, places)
        outside = outside & (places.clamp(low, high) != places).any(-1)
    return torch.cat([places.clamp(low, high), start[..., 2:]], -1)
