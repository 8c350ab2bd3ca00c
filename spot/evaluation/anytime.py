"""Calibrating a cascade on unlabelled images, and measuring one on labelled ones.

    cascade = calibrate(model, batches, budgets=(25, 49, 100), lose=0.01)
    model.cascade = cascade                     # or cascade.save("NAME.anytime.json"), beside the model
    row = measure(model, batches)               # accuracy, mean multiply-adds, where images stopped

Every budget is run once on every image, and so is the grid, with more or less merging. Then, for all choices of at most
two budgets before the grid, the weights that add up log-probabilities are fitted (least KL from the dense ViT), and
those thresholds are taken that cost the fewest multiply-adds while the cascade still answers as well as was asked for:

    lose     so much accuracy at most, as the dense ViT's own probabilities expect it: where the cascade says something
             else, what the dense ViT gives that is less than what it gives its own answer
    agree    it says what the dense ViT says on so many of the images where the grid alone does
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spot import report
from spot.data.loader import Batch
from spot.errors import InputError
from spot.evaluation.accuracy import wilson
from spot.evaluation.cost import macs
from spot.models.anytime import Cascade, Stage, joined, on_the_grid
from spot.models.protocol import Placed
from spot.models.spot_vit import SpotViT
from spot.placement.policy import hash_of

SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the grid: budgets of the stages before it, unless told otherwise
MERGED = (0, 0.02, 0.03, 0.04, 0.05, 0.06)  # of the grid: how many tokens its blocks may merge
EARLY = 2  # at most so many stages before the grid
LEVELS = 100  # thresholds that are tried for a stage: quantiles of its confidence


class Said(NamedTuple):
    """What a model says of M images in each of S possible stages; and what the dense ViT says."""

    stages: Tensor  # (S, M, classes) log-probabilities
    dense: Tensor  # (M, classes) log-probabilities
    labels: Tensor  # (M,) int64, -1 where unknown
    keys: Sequence[str] = ()  # M


class Chosen(NamedTuple):
    """The cheapest cascade that is good enough, and what it does on the images it was chosen on."""

    stages: tuple[Stage, ...]
    agreed: float  # the share of images on which it says what the dense ViT says
    lost: float  # accuracy, as the dense ViT's probabilities expect it
    macs: float  # mean multiply-adds


def possible_stages(
    model: SpotViT, budgets: Sequence[int], *, merge: bool = True, base: bool = False, prior: str | None = None
) -> list[Stage]:
    """The stages that a cascade can have, with their costs: every budget, then the grid with more and more merging."""
    cells = len(model.grid())
    stages = [Stage(budget, macs(Placed(model, budget, prior))) for budget in budgets]
    for merged in sorted({round(share * cells) for share in MERGED}) if merge else [0]:
        try:
            reader = on_the_grid(model, base, merged)
        except InputError:  # a ViT whose tokens cannot be merged
            continue
        stages.append(Stage(cells, macs(reader if merged else Placed(model, cells, "isotropic")), merged=merged))
    return stages


@torch.no_grad()
def listen(
    model: SpotViT,
    batches: Iterable[Batch],
    possible: Sequence[Stage],
    *,
    dense: SpotViT | None = None,
    base: bool = False,
    prior: str | None = None,
) -> Said:
    """Run every possible stage on every image.

    dense: the ViT to agree with; by default the one that the model was retrofitted from, or the model itself.
    """
    stages, answers, labels = [], [], []
    keys: list[str] = []
    device = next(model.parameters()).device
    cells = len(model.grid())
    ends = {each.merged: on_the_grid(model, base, each.merged) for each in possible if each.tokens == cells}
    if dense is None:
        dense = model if model.base is None else model.base_vit()
    # Where the dense ViT is one of the stages it runs once.
    same = next((i for i, each in enumerate(possible) if each.tokens == cells and ends[each.merged] is dense), None)
    for batch in report.track(batches, "calibrating"):
        images = batch.images.to(device)
        grid = model.grid(images)
        logits = [
            ends[stage.merged](images, grid)
            if stage.tokens == cells
            else model(images, tokens=stage.tokens, prior=prior)
            for stage in possible
        ]
        stages.append(torch.stack(logits).float().log_softmax(2).cpu())
        full = dense(images, grid) if same is None else logits[same]
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
    lose: float = 0.01,
    agree: float | None = None,
    merge: bool = True,
    base: bool = False,
    prior: str | None = None,
) -> Cascade:
    """The cheapest cascade that is nearly as good as the dense ViT.

    Args:
        batches: images; their labels are not looked at.
        budgets: of the stages before the grid, from which at most two are chosen; by default SHARES of the grid.
        lose: how much accuracy it may lose, as the dense ViT's probabilities expect it: 0.01 is a point.
        agree: instead, the share of images on which it must say what the dense ViT says, where the grid alone does.
        merge: the last stage may merge similar tokens (ToMe).
        base: the last stage is the ViT that the model was retrofitted from, so that nothing is lost there.
        prior: where tokens go; by default as the model says.
    """
    if agree is not None and not 0 < agree <= 1:
        raise InputError(f"agree is a share of the images, above 0 and at most 1, got {agree}")
    if not 0 <= lose < 1:
        raise InputError(f"lose is a share of the images, from 0 to below 1 (0.01 is one point), got {lose}")
    cells = len(model.grid())
    budgets = sorted(set(budgets or (math.ceil(cells * share) for share in SHARES)))
    if not budgets or budgets[0] < 1 or budgets[-1] >= cells:
        raise InputError(f"budgets are from 1 to below the grid's {cells} tokens, got {tuple(budgets)}")
    if base:
        model.base_vit()  # refuses a model without
    stages = possible_stages(model, budgets, merge=merge, base=base, prior=prior)
    said = listen(model, batches, stages, base=base, prior=prior)
    chosen = cheapest(said, stages, lose=lose, agree=agree)
    low, high = wilson(chosen.agreed, len(said.dense))
    made = {
        "images": len(said.dense), **({"lose": lose} if agree is None else {"agree": agree}),
        "agreed": chosen.agreed, "low": low, "high": high, "lost": chosen.lost,
        "macs": chosen.macs / stages[len(budgets)].macs, "budgets": list(budgets), "merge": merge,
    }  # fmt: skip
    return Cascade(chosen.stages, hash_of(model), base, prior, made)


class Way(NamedTuple):
    """A cascade without thresholds: its stages, and of each what it says (M,) and how sure it is (M,)."""

    stages: list[Stage]
    guesses: list[Tensor]
    confidences: list[Tensor]


def ways(said: Said, possible: Sequence[Stage]) -> list[Way]:
    """All cascades of at most EARLY budgets and the grid, with the weights that add up what their stages say."""
    cells = max(stage.tokens for stage in possible)
    ends = [index for index, stage in enumerate(possible) if stage.tokens == cells]
    early = [index for index in range(len(possible)) if index not in ends]
    nothing = Way([], [], []), torch.zeros_like(said.dense)
    begun: dict[tuple[int, ...], tuple[Way, Tensor]] = {(): nothing}  # by the stages before the grid; what they know

    def longer(before: tuple[int, ...], index: int) -> tuple[Way, Tensor]:
        way, known = begun[before]
        own, earlier = fitted(said.stages[index], known if before else None, said.dense)
        stage = replace(possible[index], own=own, earlier=earlier)
        known = joined(said.stages[index], known, stage)
        confidence, guess = known.softmax(1).max(1)
        return Way([*way.stages, stage], [*way.guesses, guess], [*way.confidences, confidence]), known

    for count in range(1, EARLY + 1):
        for chosen in combinations(early, count):
            begun[chosen] = longer(chosen[:-1], chosen[-1])
    return [longer(chosen, end)[0] for chosen in begun for end in ends]


def cheapest(
    said: Said,
    possible: Sequence[Stage],
    *,
    lose: float = 0.01,
    agree: float | None = None,
    tried: Sequence[Way] | None = None,
) -> Chosen:
    """Of all cascades the cheapest that is good enough; see the module. tried: `ways`, where they are known already."""
    answer, likely = said.dense.argmax(1), said.dense.exp()

    def score(guess: Tensor) -> Tensor:
        """What answers (M,) are worth, one by one."""
        return likely.gather(1, guess[:, None])[:, 0] if agree is None else (guess == answer).float()

    if agree is None:
        wanted = score(answer).mean().item() - lose
    else:
        cells = [stage.tokens for stage in possible]
        wanted = score(said.stages[cells.index(max(cells))].argmax(1)).mean().item() - (1 - agree)
    best: tuple[float, tuple[Stage, ...], Tensor] | None = None
    for way in ways(said, possible) if tried is None else tried:
        scores = [score(guess) for guess in way.guesses]
        found = thresholds(way.confidences, scores, [stage.macs for stage in way.stages], wanted)
        if found is not None and (best is None or found[1] < best[0]):
            limits = (*found[0], 0.0)
            stages = tuple(replace(stage, threshold=limit) for stage, limit in zip(way.stages, limits, strict=True))
            best = found[1], stages, stopped(way.confidences, way.guesses, limits)
    assert best is not None  # the grid alone is as good as itself
    cost, chosen, guess = best
    lost = (likely.amax(1) - likely.gather(1, guess[:, None])[:, 0]).mean().item()
    return Chosen(chosen, (guess == answer).double().mean().item(), lost, cost)


def stopped(confidences: Sequence[Tensor], guesses: Sequence[Tensor], limits: Sequence[float]) -> Tensor:
    """What is said of each image (M,) at the first stage whose threshold it reaches."""
    said = guesses[-1]
    for confidence, guess, limit in reversed(list(zip(confidences, guesses, limits, strict=True))):
        said = torch.where(confidence >= limit, guess, said)
    return said


def thresholds(
    confidences: Sequence[Tensor], scores: Sequence[Tensor], costs: Sequence[int], wanted: float
) -> tuple[tuple[float, ...], float] | None:
    """The cheapest thresholds of all stages but the last whose mean score is as wanted, and their mean cost.

    confidences and scores: (M,) for every stage. None where no thresholds are good enough.
    """
    levels = torch.linspace(0, 1, LEVELS + 1, dtype=torch.float64)
    tried = [torch.cat([each.double().quantile(levels), levels.new_tensor([2.0])]) for each in confidences[:-1]]
    # Outcomes of all combinations at once, from the last stage to the first: (K, ..., M), one K for every stage but it.
    worth, cost = scores[-1].double(), torch.full_like(scores[-1], costs[-1], dtype=torch.float64)
    for confidence, score, price, limits in reversed(list(zip(confidences, scores, costs, tried, strict=False))):
        stops = (confidence.double() >= limits[:, None]).view(len(limits), *[1] * (worth.dim() - 1), len(score))
        worth, cost = torch.where(stops, score.double(), worth), price + torch.where(stops, 0.0, cost)
    share, mean = worth.mean(-1), cost.mean(-1)
    good = share >= wanted - 1e-9
    if not good.any():
        return None
    place = torch.unravel_index(mean.where(good, math.inf).argmin(), mean.shape) if mean.dim() else ()
    return tuple(each[index].item() for each, index in zip(tried, place, strict=True)), mean[place].item()


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
