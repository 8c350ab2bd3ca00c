"""Calibrating a cascade on unlabelled images, and measuring one on labelled ones.

    cascade = calibrate(model, batches, budgets=(25, 49, 100), lose=0.01)
    model.cascade = cascade                     # or cascade.save("NAME.anytime.json"), beside the model
    row = measure(model, batches)               # accuracy, mean multiply-adds, where images stopped

Every budget is run once on every image, and so is the grid, each with more or less merging. Then, for all choices of at
most two stages before the grid, the weights that add up log-probabilities are fitted (least KL from the dense ViT), and
those thresholds are taken that cost the fewest multiply-adds while the cascade still answers as well as was asked for:

    lose     so much accuracy at most, as the dense ViT's own probabilities expect it: where the cascade says something
             else, what the dense ViT gives that is less than what it gives its own answer
    agree    it says what the dense ViT says on so many of the images where the grid alone does
    cost     or the other way round: the least expected loss at no more than this share of the dense ViT's multiply-adds
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spot import report
from spot.data.loader import Batch
from spot.errors import InputError
from spot.evaluation.accuracy import wilson
from spot.evaluation.cost import macs
from spot.models.anytime import Cascade, Stage, joined, reader_of
from spot.models.protocol import Placed
from spot.models.spot_vit import SpotViT
from spot.models.tome_schedule import late
from spot.placement.policy import hash_of

SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the grid: budgets of the stages before it, unless told otherwise
# How stages may merge: this share of their tokens, from this share of the blocks on.
GRID_MERGES = ((0.72, 5 / 12), (0.65, 1 / 3), (0.82, 1 / 3), (0.74, 1 / 4), (0.83, 1 / 4), (0.8, 1 / 6))
EARLY_MERGES = ((0.7, 1 / 4), (0.8, 1 / 4))
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
    """The stages that a cascade can have, with their costs: every budget, then the grid, without merging and with."""
    cells, depth = len(model.grid()), len(model.vit.blocks)
    stages = []
    for tokens in (*budgets, cells):
        grid = tokens == cells
        stages.append(Stage(tokens, macs(Placed(model, tokens, "isotropic" if grid else prior))))
        for share, begin in (GRID_MERGES if grid else EARLY_MERGES) if merge else ():
            stage = replace(stages[-1], merged=tuple(late(share, begin, tokens, depth)))
            if not any(stage.merged) or stage.merged in [each.merged for each in stages if each.tokens == tokens]:
                continue
            try:
                reader = reader_of(model, stage, grid=grid, base=base, prior=prior)
            except InputError:  # a ViT whose tokens cannot be merged
                break
            stages.append(replace(stage, macs=macs(reader)))
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
    mirror: bool = False,
) -> Said:
    """Run every possible stage on every image.

    dense: the ViT to agree with; by default the one that the model was retrofitted from, or the model itself.
    mirror: and on its mirror image, as images of their own.
    """
    stages, answers, labels = [], [], []
    keys: list[str] = []
    device = next(model.parameters()).device
    cells = len(model.grid())
    readers = [reader_of(model, each, grid=each.tokens == cells, base=base, prior=prior) for each in possible]
    if dense is None:
        dense = model if model.base is None else model.base_vit()
    same = next((i for i, each in enumerate(readers) if each is dense), None)  # then it runs once
    for batch in report.track(batches, "calibrating"):
        given = batch.images.to(device)
        for images in (given, given.flip(-1)) if mirror else (given,):
            grid = model.grid(images)
            logits = [
                reader(images, grid if stage.tokens == cells else None)
                for stage, reader in zip(possible, readers, strict=True)
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
    cost: float | None = None,
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
        cost: instead, the share of the dense ViT's multiply-adds that it may have, for as little loss as that allows.
        merge: stages may merge similar tokens on the way (ToMe).
        base: the last stage is the ViT that the model was retrofitted from, so that nothing is lost there.
        prior: where tokens go; by default as the model says.
    """
    if cost is not None and not 0 < cost <= 1:
        raise InputError(f"cost is a share of the dense ViT's multiply-adds, above 0 and at most 1, got {cost}")
    if agree is not None and not 0 < agree <= 1:
        raise InputError(f"agree is a share of the images, above 0 and at most 1, got {agree}")
    if not 0 <= lose < 1:
        raise InputError(f"lose is a share of the images, from 0 to below 1 (0.01 is one point), got {lose}")
    if cost is not None and agree is not None:
        raise InputError("give either the agreement or the cost that a cascade is to have, not both")
    cells = len(model.grid())
    budgets = sorted(set(budgets or (math.ceil(cells * share) for share in SHARES)))
    if not budgets or budgets[0] < 1 or budgets[-1] >= cells:
        raise InputError(f"budgets are from 1 to below the grid's {cells} tokens, got {tuple(budgets)}")
    if base:
        model.base_vit()  # refuses a model without
    stages = possible_stages(model, budgets, merge=merge, base=base, prior=prior)
    # Of many cascades the best looks better than it is; twice as many pictures make that less.
    said = listen(model, batches, stages, base=base, prior=prior, mirror=True)
    chosen = cheapest(said, stages, lose=lose, agree=agree, cost=cost)
    dense = next(stage.macs for stage in stages if stage.tokens == cells)
    asked = {"cost": cost} if cost is not None else {"lose": lose} if agree is None else {"agree": agree}
    images = len(said.dense) // 2
    low, high = wilson(chosen.agreed, images)
    made = {
        "images": images, **asked, "agreed": chosen.agreed, "low": low, "high": high, "lost": chosen.lost,
        "macs": chosen.macs / dense, "budgets": list(budgets), "merge": merge,
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
            if all(possible[one].tokens < possible[next_].tokens for one, next_ in pairwise(chosen)):
                begun[chosen] = longer(chosen[:-1], chosen[-1])
    return [longer(chosen, end)[0] for chosen in begun for end in ends]


def cheapest(
    said: Said,
    possible: Sequence[Stage],
    *,
    lose: float = 0.01,
    agree: float | None = None,
    cost: float | None = None,
    tried: Sequence[Way] | None = None,
) -> Chosen:
    """Of all cascades the cheapest that is good enough, or the best that is cheap enough; see the module.

    tried: `ways`, where they are known already.
    """
    answer, likely = said.dense.argmax(1), said.dense.exp()

    def score(guess: Tensor) -> Tensor:
        """What answers (M,) are worth, one by one."""
        return likely.gather(1, guess[:, None])[:, 0] if agree is None else (guess == answer).float()

    cells = [stage.tokens for stage in possible]
    grid = cells.index(max(cells))  # without merging, which comes first
    wanted, most = -math.inf, math.inf
    if cost is not None:
        most = cost * possible[grid].macs
    elif agree is None:
        wanted = score(answer).mean().item() - lose
    else:
        wanted = score(said.stages[grid].argmax(1)).mean().item() - (1 - agree)
    best: tuple[float, tuple[Stage, ...], Tensor, float] | None = None
    for way in ways(said, possible) if tried is None else tried:
        scores = [score(guess) for guess in way.guesses]
        found = thresholds(way.confidences, scores, [stage.macs for stage in way.stages], wanted, most)
        if found is None:
            continue
        spent = found.macs if cost is None else -found.score  # what is to be small
        if best is None or spent < best[0]:
            limits = (*found.limits, 0.0)
            stages = tuple(replace(stage, threshold=limit) for stage, limit in zip(way.stages, limits, strict=True))
            best = spent, stages, stopped(way.confidences, way.guesses, limits), found.macs
    if best is None:  # only for want of multiply-adds: the grid alone is as good as itself
        raise InputError(f"no cascade of these stages costs at most {cost} of the dense ViT; begin with fewer tokens")
    _, chosen, guess, mean = best
    lost = (likely.amax(1) - likely.gather(1, guess[:, None])[:, 0]).mean().item()
    return Chosen(chosen, (guess == answer).double().mean().item(), lost, mean)


def stopped(confidences: Sequence[Tensor], guesses: Sequence[Tensor], limits: Sequence[float]) -> Tensor:
    """What is said of each image (M,) at the first stage whose threshold it reaches."""
    said = guesses[-1]
    for confidence, guess, limit in reversed(list(zip(confidences, guesses, limits, strict=True))):
        said = torch.where(confidence >= limit, guess, said)
    return said


class Limits(NamedTuple):
    """Thresholds of all stages but the last, with the mean score and the mean cost that they give."""

    limits: tuple[float, ...]
    score: float
    macs: float


def thresholds(
    confidences: Sequence[Tensor],
    scores: Sequence[Tensor],
    costs: Sequence[int],
    wanted: float,
    most: float = math.inf,
) -> Limits | None:
    """The cheapest thresholds whose mean score is as wanted; with a limit `most` of the mean cost the best below it.

    confidences and scores: (M,) for every stage. None where no thresholds are good enough.
    """
    levels = torch.linspace(0, 1, LEVELS + 1, dtype=torch.float64)
    tried = [torch.cat([each.double().quantile(levels), levels.new_tensor([2.0])]) for each in confidences[:-1]]
    # Outcomes of all combinations at once, from the last stage to the first: (K, ..., M), one K for every stage but it.
    worth, cost = scores[-1].double(), torch.full_like(scores[-1], costs[-1], dtype=torch.float64)
    share, mean = worth.mean(), cost.mean()
    for stage in reversed(range(len(tried))):
        stops = (confidences[stage].double() >= tried[stage][:, None]).double()  # (K, M)
        score = scores[stage].double()
        if stage == 0:  # only means over images are wanted, which are products
            later = (1 - stops) / len(score)
            share = later @ worth.reshape(-1, len(score)).T + (stops * score).mean(1, keepdim=True)
            mean = costs[0] + later @ cost.reshape(-1, len(score)).T
            share, mean = (each.view(len(stops), *worth.shape[:-1]) for each in (share, mean))
            break
        stops = stops.view(len(stops), *[1] * (worth.dim() - 1), -1)
        worth, cost = stops * score + (1 - stops) * worth, costs[stage] + (1 - stops) * cost
    good = (share >= wanted - 1e-9) & (mean <= most)
    if not good.any():
        return None
    small = mean if most == math.inf else -share
    place = torch.unravel_index(small.where(good, math.inf).argmin(), mean.shape) if mean.dim() else ()
    chosen = tuple(each[index].item() for each, index in zip(tried, place, strict=True))
    return Limits(chosen, share[place].item(), mean[place].item())


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
