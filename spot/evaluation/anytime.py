"""Calibrating a cascade on unlabelled images, and measuring one on labelled ones.

    cascade = calibrate(model, batches, budgets=(25, 49, 100), agree=0.97)
    model.cascade = cascade                     # or cascade.save("NAME.anytime.json"), beside the model
    row = measure(model, batches)               # accuracy, mean multiply-adds, where images stopped

Every budget is run once on every image. Then, for all choices of at most two of them before the grid, the weights
that add up log-probabilities are fitted (least KL from the dense ViT), and those thresholds are taken that cost the
fewest multiply-adds while the cascade still agrees with the dense ViT as often as was asked for.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spot import report
from spot.data.loader import Batch
from spot.errors import InputError
from spot.evaluation.accuracy import wilson
from spot.evaluation.cost import macs
from spot.models.anytime import Cascade, Stage, joined
from spot.models.protocol import Placed
from spot.models.spot_vit import SpotViT
from spot.placement.policy import hash_of

SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the grid: budgets of the stages before it, unless told otherwise
EARLY = 2  # at most so many stages before the grid
LEVELS = 100  # thresholds that are tried for a stage: quantiles of its confidence


class Said(NamedTuple):
    """What a model says of M images with each of S budgets, the last of them the grid; and what the dense ViT says."""

    stages: Tensor  # (S, M, classes) log-probabilities
    dense: Tensor  # (M, classes) log-probabilities
    labels: Tensor  # (M,) int64, -1 where unknown
    keys: Sequence[str] = ()  # M


@torch.no_grad()
def listen(
    model: SpotViT,
    batches: Iterable[Batch],
    budgets: Sequence[int],
    *,
    dense: SpotViT | None = None,
    base: bool = False,
    prior: str | None = None,
) -> Said:
    """Run every budget and the grid on every image.

    dense: the ViT to agree with; by default the one that the model was retrofitted from, or the model itself.
    """
    stages, answers, labels = [], [], []
    keys: list[str] = []
    device = next(model.parameters()).device
    if dense is None:
        dense = model if model.base is None else model.base_vit()
    for batch in report.track(batches, "calibrating"):
        images = batch.images.to(device)
        grid = model.grid(images)
        full = dense(images, grid)
        logits = [model(images, tokens=budget, prior=prior) for budget in budgets]
        logits.append(full if base or dense is model else model(images, grid))
        stages.append(torch.stack(logits).float().log_softmax(2).cpu())
        answers.append(full.float().log_softmax(1).cpu())
        labels.append(batch.labels)
        keys += batch.keys
    if not keys:
        raise InputError("no image could be read, so there is nothing to calibrate on")
    return Said(torch.cat(stages, 1), torch.cat(answers), torch.cat(labels), keys)


def calibrate(
    model: SpotViT,
    batches: Iterable[Batch],
    *,
    budgets: Sequence[int] = (),
    agree: float = 0.99,
    base: bool = False,
    prior: str | None = None,
) -> Cascade:
    """The cheapest cascade that agrees with the dense ViT on at most 1 − agree fewer images than its last stage.

    Args:
        batches: images; their labels are not looked at.
        budgets: of the stages before the grid, from which at most two are chosen; by default SHARES of the grid.
        base: the last stage is the ViT that the model was retrofitted from, so that nothing is lost there.
        prior: where tokens go; by default as the model says.
    """
    if not 0 < agree <= 1:
        raise InputError(f"agree is a share of the images, above 0 and at most 1, got {agree}")
    cells = len(model.grid())
    budgets = sorted(set(budgets or (math.ceil(cells * share) for share in SHARES)))
    if not budgets or budgets[0] < 1 or budgets[-1] >= cells:
        raise InputError(f"budgets are from 1 to below the grid's {cells} tokens, got {tuple(budgets)}")
    if base:
        model.base_vit()  # refuses a model without
    said = listen(model, batches, budgets, base=base, prior=prior)
    costs = [macs(Placed(model, budget, prior)) for budget in budgets] + [macs(Placed(model, cells, "isotropic"))]
    stages, reached, cost = cheapest(said, budgets, costs, cells, agree)
    low, high = wilson(reached, len(said.dense))
    made = {
        "images": len(said.dense), "agree": agree, "reached": reached, "low": low, "high": high,
        "macs": cost / costs[-1], "budgets": list(budgets),
    }  # fmt: skip
    return Cascade(tuple(stages), hash_of(model), base, prior, made)


def cheapest(
    said: Said, budgets: Sequence[int], costs: Sequence[int], cells: int, agree: float
) -> tuple[list[Stage], float, float]:
    """Stages, the share of images on which they agree with the dense ViT, and their mean multiply-adds."""
    best: tuple[list[Stage], float, float] | None = None
    answer = said.dense.argmax(1)
    wanted = (said.stages[-1].argmax(1) == answer).double().mean().item() - (1 - agree)
    for count in range(EARLY + 1):
        for chosen in combinations(range(len(budgets)), count):
            stages, known = [], torch.zeros_like(said.dense)
            confidences, agrees = [], []
            for place, index in enumerate((*chosen, len(budgets))):
                own, earlier = fitted(said.stages[index], known if place else None, said.dense)
                tokens = budgets[index] if index < len(budgets) else cells
                stages.append(Stage(tokens, costs[index], 0.0, own, earlier))
                known = joined(said.stages[index], known, stages[-1])
                confidences.append(known.softmax(1).amax(1))
                agrees.append(known.argmax(1) == answer)
            found = thresholds(confidences, agrees, [stage.macs for stage in stages], wanted)
            if found is not None and (best is None or found[2] < best[2]):
                limits = (*found[0], 0.0)
                best = [stage_at(*each) for each in zip(stages, limits, strict=True)], found[1], found[2]
    assert best is not None  # the grid alone agrees as often as itself
    return best


def stage_at(stage: Stage, threshold: float) -> Stage:
    return Stage(stage.tokens, stage.macs, threshold, stage.own, stage.earlier)


def thresholds(
    confidences: Sequence[Tensor], agrees: Sequence[Tensor], costs: Sequence[int], wanted: float
) -> tuple[tuple[float, ...], float, float] | None:
    """The cheapest thresholds of all stages but the last with this share of agreements, the share, and the mean cost.

    confidences and agrees: (M,) for every stage. None where no thresholds agree so often.
    """
    best = None
    levels = torch.linspace(0, 1, LEVELS + 1, dtype=torch.float64)
    tried = [[*each.double().quantile(levels).tolist(), 2.0] for each in confidences[:-1]]  # above 1: nobody stops
    for limits in product(*tried):
        left = torch.ones_like(agrees[0])
        agreed, cost = 0, 0
        for confidence, right, price, limit in zip(confidences, agrees, costs, (*limits, -1.0), strict=True):
            cost += price * int(left.sum())
            stops = left & (confidence >= limit)
            agreed += int((right & stops).sum())
            left = left & ~stops
        share, mean = agreed / len(left), cost / len(left)
        if share >= wanted - 1e-9 and (best is None or mean < best[2]):
            best = limits, share, mean
    return best


def fitted(own: Tensor, earlier: Tensor | None, dense: Tensor) -> tuple[float, float]:
    """Weights of log-probabilities (M, classes) whose sum is nearest to the dense ViT's, by KL: convex, by Newton."""
    parts = torch.stack([own] if earlier is None else [own, earlier], -1).double()  # (M, classes, 1 or 2)
    weights = torch.zeros(parts.shape[-1], dtype=torch.float64)
    weights[0] = 1.0
    target = torch.einsum("mc,mck->mk", dense.double().exp(), parts)
    for _ in range(20):
        p = (parts @ weights).softmax(1)
        mean = torch.einsum("mc,mck->mk", p, parts)
        gradient = (mean - target).mean(0)
        spread = torch.einsum("mc,mck,mcl->kl", p, parts, parts) - mean.T @ mean
        step = torch.linalg.solve(spread / len(parts) + 1e-6 * torch.eye(len(weights)), gradient)
        weights = weights - step
        if step.abs().max() < 1e-6:
            break
    return weights[0].item(), weights[1].item() if earlier is not None else 0.0


@torch.no_grad()
def measure(model: SpotViT, batches: Iterable[Batch], until: float | None = None) -> dict[str, Any]:
    """Accuracy of a cascade, its mean cost, and the share of images that stopped at each stage.

    until: see SpotViT.look.
    """
    right: list[Tensor] = []
    cost: list[Tensor] = []
    tokens: list[Tensor] = []
    device = next(model.parameters()).device
    for batch in report.track(batches, "looking"):
        *_, step = model.look(batch.images.to(device), until)
        right.append(step.logits.argmax(1).cpu() == batch.labels)
        cost.append(step.macs.cpu())
        tokens.append(step.tokens.cpu())
    if not right:
        raise InputError("no image could be read, so there is nothing to measure")
    good, spent, count = torch.cat(right).double(), torch.cat(cost).double(), torch.cat(tokens)
    low, high = wilson(good.mean().item(), len(good))
    ends = torch.tensor([stage.tokens for stage in model.cascade.stages]).cumsum(0)  # type: ignore[union-attr]
    return {
        "placement": "anytime", "tokens": round(count.double().mean().item(), 1), "gmacs": spent.mean().item() / 1e9,
        "top1": 100 * good.mean().item(), "low": 100 * low, "high": 100 * high, "images": len(good),
        "stopped": {int(end): round((count == end).double().mean().item(), 4) for end in ends},
    }  # fmt: skip
