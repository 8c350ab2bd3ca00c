"""Calibrate a cascade on unlabelled images, and measure one on labelled images.

    cascade = calibrate(spot.Family("vit-ti"), batches, budgets=(25, 49, 100), lose=0.01)
    cascade.save("vit-ti.cascade.json")
    row = measure(cascade, batches)             # accuracy, mean multiply-adds, share of images per stage

Every budget and the grid run once on every image, with several amounts of merging. For each choice of at most two
stages before the grid, the weights of the summed log-probabilities are fitted to the dense ViT (least KL). Among all
thresholds, calibration chooses those with the lowest cost that reach one of these goals:

    lose     the expected loss of accuracy is at most this. If the cascade predicts another class, the expected loss
             is the dense ViT's probability of its own class minus that of the cascade's class
    agree    the cascade agrees with the dense ViT on at least this share of the images
    cost     the reverse: the least expected loss at no more than this share of the dense ViT's multiply-adds
    time     like `cost` with measured time: each stage is timed on one image, interleaved with the others
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spot import report
from spot.data.loader import Batch
from spot.errors import InputError
from spot.evaluation.accuracy import top1_row, wilson
from spot.evaluation.cost import image_shape, macs
from spot.evaluation.throughput import Clock, interleaved
from spot.models.cascade import Cascade, Stage, predict_stage, stage_model
from spot.models.family import Family, Source, at_budget, dense_model
from spot.models.tome_schedule import four_blocks, merge_share
from spot.models.wrappers import TokenModel

SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the grid: default budgets of the stages before it
# Merging options of a stage: this share of its tokens, from this share of the blocks on.
GRID_MERGES = ((0.72, 5 / 12), (0.65, 1 / 3), (0.82, 1 / 3), (0.74, 1 / 4), (0.83, 1 / 4), (0.8, 1 / 6))
EARLY_MERGES = ((0.7, 1 / 4), (0.8, 1 / 4))
FEW_MERGES = (0.5, 0.6, 0.7)  # for goals in time, these shares are merged in few blocks instead
ROUNDS = 15  # of timing
EARLY = 2  # the largest number of stages before the grid
LEVELS = 100  # number of thresholds tried for a stage: quantiles of its confidence


class Predicted(NamedTuple):
    """Predictions for M images in each of S possible stages, and the dense ViT's."""

    stages: Tensor  # (S, M, classes) log-probabilities
    dense: Tensor  # (M, classes) log-probabilities
    labels: Tensor  # (M,) int64, -1 if unknown
    keys: Sequence[str] = ()  # M


class Candidates(NamedTuple):
    """All possible stages of a cascade, with their models. Those of the grid come last, the unmerged one first."""

    stages: list[Stage]
    models: list[TokenModel]


class Chosen(NamedTuple):
    """The chosen cascade, with its results on the calibration images."""

    stages: tuple[Stage, ...]
    agreed: float  # the share of images on which it agrees with the dense ViT
    lost: float  # expected loss of accuracy under the dense ViT's probabilities
    macs: float  # mean multiply-adds
    took: float = 1.0  # cost as a share of the dense ViT's multiply-adds or, for goals in time, of its time


def possible_stages(
    source: Source, budgets: Sequence[int], *, merge: bool = True, prior: str | None = None, few: bool = False
) -> Candidates:
    """All possible stages of a cascade: every budget, then the grid, each without and with merging.

    few: merge in few blocks, which takes less time.
    """
    found = Candidates([], [])
    dense = dense_model(source)
    cells, depth = len(dense.grid()), len(dense.vit.blocks)
    for tokens in (*budgets, cells):
        grid = tokens == cells
        model = dense if grid else at_budget(source, tokens, prior=prior)
        plain = Stage(tokens, macs(model.at(prior="isotropic") if grid else model))
        found.stages.append(plain)
        found.models.append(stage_model(model, plain, grid=grid))
        if few:
            schedules = [merge_share(share, four_blocks(depth), tokens, depth) for share in FEW_MERGES]
        else:
            pairs = GRID_MERGES if grid else EARLY_MERGES
            late = [(share, range(round(begin * depth), depth)) for share, begin in pairs]
            schedules = [merge_share(share, blocks, tokens, depth) for share, blocks in late]
        for merged in dict.fromkeys(map(tuple, schedules)) if merge else ():
            if not any(merged):
                continue
            try:
                merging = stage_model(model, replace(plain, merged=merged), grid=grid)
            except InputError:  # a ViT whose tokens cannot be merged
                break
            found.stages.append(replace(plain, merged=merged, macs=macs(merging)))
            found.models.append(merging)
    return found


@torch.no_grad()
def predict_all(candidates: Candidates, batches: Iterable[Batch], *, mirror: bool = False) -> Predicted:
    """Run every possible stage on every image.

    mirror: also run on horizontally flipped images, as additional images.
    """
    made, labels = [], []
    keys: list[str] = []
    tokens = [stage.tokens for stage in candidates.stages]
    unmerged = tokens.index(tokens[-1])  # the dense ViT
    device = next(candidates.models[unmerged].parameters()).device
    for batch in report.track(batches, "calibrating"):
        given = batch.images.to(device)
        for images in (given, given.flip(-1)) if mirror else (given,):
            logits = torch.stack([model(images) for model in candidates.models])
            made.append(logits.float().log_softmax(2).cpu())
            labels.append(batch.labels)
            keys += batch.keys
    if not keys:
        raise InputError("no image could be read, so there is nothing to calibrate on")
    stages = torch.cat(made, 1)
    return Predicted(stages, stages[unmerged], torch.cat(labels), keys)


def calibrate(
    source: Source,
    batches: Iterable[Batch],
    *,
    budgets: Sequence[int] = (),
    lose: float = 0.01,
    agree: float | None = None,
    cost: float | None = None,
    time: float | None = None,
    merge: bool = True,
    prior: str | None = None,
    timer: Callable[[Candidates], Mapping[tuple[Any, ...], float]] | None = None,
) -> Cascade:
    """Choose the cheapest cascade that is nearly as accurate as the dense ViT.

    Args:
        source: a family, whose dense ViT is the original one, or a model.
        batches: images; their labels are not used.
        budgets: of the stages before the grid, from which at most two are chosen; by default SHARES of the grid.
        lose: the largest expected loss of accuracy; 0.01 is one point.
        agree: instead, the required agreement with the dense ViT, as a share of the images.
        cost: instead, the largest share of the dense ViT's multiply-adds.
        time: instead, the largest share of the dense ViT's latency for one image, measured on this machine.
        merge: allow stages to merge similar tokens (ToMe).
        prior: the placement; by default the model's own.
        timer: measures the seconds of each stage, by tokens and merges; by default `stage_seconds`, in eager PyTorch.
    """
    shares = {name: share for name, share in (("agree", agree), ("cost", cost), ("time", time)) if share is not None}
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise InputError(f"{name} is a share, above 0 and at most 1, got {share}")
    if len(shares) > 1:
        raise InputError("give only one of agree, cost and time")
    if not 0 <= lose < 1:
        raise InputError(f"lose is a share of the images, from 0 to below 1 (0.01 is one point), got {lose}")
    cells = source.cells if isinstance(source, Family) else len(source.grid())
    budgets = sorted(set(budgets or (math.ceil(cells * share) for share in SHARES)))
    if not budgets or budgets[0] < 1 or budgets[-1] >= cells:
        raise InputError(f"budgets are from 1 to below the grid's {cells} tokens, got {tuple(budgets)}")
    candidates = possible_stages(source, budgets, merge=merge, prior=prior, few=time is not None)
    stages = candidates.stages
    # The best of many cascades is overestimated on its own images; twice as many images reduce this bias.
    predicted = predict_all(candidates, batches, mirror=True)
    seconds = None if time is None else (timer or stage_seconds)(candidates)
    chosen = cheapest(predicted, stages, lose=lose, agree=agree, cost=cost if time is None else time, seconds=seconds)
    dense = next(stage.macs for stage in stages if stage.tokens == cells)
    images = len(predicted.dense) // 2
    low, high = wilson(chosen.agreed, images)
    made = {
        "images": images, **(shares or {"lose": lose}), **({} if time is None else {"took": chosen.took}),
        "agreed": chosen.agreed, "low": low, "high": high, "lost": chosen.lost,
        "macs": chosen.macs / dense, "budgets": list(budgets), "merge": merge,
    }  # fmt: skip
    return Cascade(source, chosen.stages, prior=prior, calibration=made)


class Way(NamedTuple):
    """A cascade without thresholds: its stages, with predictions (M,) and confidences (M,) for each stage."""

    stages: list[Stage]
    guesses: list[Tensor]
    confidences: list[Tensor]


def ways(predicted: Predicted, possible: Sequence[Stage]) -> list[Way]:
    """All cascades of at most EARLY budgets and the grid, with fitted weights of log-probabilities."""
    cells = max(stage.tokens for stage in possible)
    ends = [index for index, stage in enumerate(possible) if stage.tokens == cells]
    early = [index for index in range(len(possible)) if index not in ends]
    nothing = Way([], [], []), torch.zeros_like(predicted.dense)
    begun: dict[tuple[int, ...], tuple[Way, Tensor]] = {(): nothing}  # by stages before the grid

    def longer(before: tuple[int, ...], index: int) -> tuple[Way, Tensor]:
        way, known = begun[before]
        weight, earlier = fit_weights(predicted.stages[index], known if before else None, predicted.dense)
        stage = replace(possible[index], weight=weight, earlier_weight=earlier)
        known = stage.add(predicted.stages[index], known)
        confidence, guess = known.softmax(1).max(1)
        return Way([*way.stages, stage], [*way.guesses, guess], [*way.confidences, confidence]), known

    for count in range(1, EARLY + 1):
        for chosen in combinations(early, count):
            if all(possible[one].tokens < possible[next_].tokens for one, next_ in pairwise(chosen)):
                begun[chosen] = longer(chosen[:-1], chosen[-1])
    return [longer(chosen, end)[0] for chosen in begun for end in ends]


def cheapest(
    predicted: Predicted,
    possible: Sequence[Stage],
    *,
    lose: float = 0.01,
    agree: float | None = None,
    cost: float | None = None,
    tried: Sequence[Way] | None = None,
    seconds: Mapping[tuple[Any, ...], float] | None = None,
) -> Chosen:
    """The cheapest cascade that reaches the goal or, for a cost or time, the best one within it; see the module.

    Args:
        tried: precomputed `ways`.
        seconds: time of each stage, by tokens and merges; used as the cost instead of multiply-adds.
    """

    def price(stage: Stage) -> float:
        return stage.macs if seconds is None else seconds[stage.tokens, stage.merged]

    answer, likely = predicted.dense.argmax(1), predicted.dense.exp()

    def score(guess: Tensor) -> Tensor:
        """The expected accuracy, or agreement, of predictions (M,), per image."""
        return likely.gather(1, guess[:, None])[:, 0] if agree is None else (guess == answer).float()

    whole = price(max(possible, key=lambda stage: stage.tokens))  # of the grid; the first one is without merging
    wanted, most = -math.inf, math.inf
    if cost is not None:
        most = cost * whole
    else:
        wanted = score(answer).mean().item() - (lose if agree is None else 1 - agree)
    good: list[tuple[Way, Limits]] = []
    for way in ways(predicted, possible) if tried is None else tried:
        scores, costs = [score(guess) for guess in way.guesses], [price(stage) for stage in way.stages]
        if (found := thresholds(way.confidences, scores, costs, wanted, most)) is not None:
            good.append((way, found))
    if not good:  # only if `cost` is too small: otherwise the grid alone qualifies
        raise InputError(f"no cascade of these stages costs at most {cost} of the dense ViT; begin with fewer tokens")
    way, found = min(good, key=lambda each: each[1].cost if cost is None else -each[1].score)
    limits = (*found.limits, 0.0)
    stages = tuple(replace(stage, threshold=limit) for stage, limit in zip(way.stages, limits, strict=True))
    sure = [confidence >= limit for confidence, limit in zip(way.confidences, limits, strict=True)]
    exits = torch.stack(sure).byte().argmax(0)  # the first stage with a confident prediction, for each image (M,)
    guess = torch.stack(way.guesses).gather(0, exits[None])[0]
    mean = torch.tensor([stage.macs for stage in stages]).cumsum(0)[exits].double().mean().item()
    lost = (likely.amax(1) - likely.gather(1, guess[:, None])[:, 0]).mean().item()
    return Chosen(stages, (guess == answer).double().mean().item(), lost, mean, found.cost / whole)


@torch.no_grad()
def stage_seconds(candidates: Candidates) -> dict[tuple[Any, ...], float]:
    """The time of each stage on one image, including placement, by tokens and merges: medians of interleaved rounds."""
    keys = [(stage.tokens, stage.merged) for stage in candidates.stages]
    model = candidates.models[0].spot_vit
    image = torch.randn(1, *image_shape(model), device=next(model.parameters()).device)
    cells = candidates.stages[-1].tokens
    calls: dict[Any, Any] = {
        key: partial(predict_stage, each, last=key[0] == cells)
        for key, each in zip(keys, candidates.models, strict=True)
    }
    interleaved(calls, image, 2)  # warm-up
    clock: Clock = "processor" if image.device.type == "cpu" and torch.get_num_threads() == 1 else "wall"
    return {key: median(seconds) for key, seconds in interleaved(calls, image, ROUNDS, clock).items()}


class Limits(NamedTuple):
    """Thresholds of all stages but the last, with the resulting mean score and mean cost."""

    limits: tuple[float, ...]
    score: float
    cost: float


def thresholds(
    confidences: Sequence[Tensor],
    scores: Sequence[Tensor],
    costs: Sequence[float],
    wanted: float,
    most: float = math.inf,
) -> Limits | None:
    """The cheapest thresholds with at least the wanted mean score; with a limit `most`, the best mean score within it.

    confidences and scores: (M,) for every stage. Returns None if no thresholds qualify.
    """
    levels = torch.linspace(0, 1, LEVELS + 1, dtype=torch.float64)
    tried = [torch.cat([each.double().quantile(levels), levels.new_tensor([2.0])]) for each in confidences[:-1]]
    # Outcomes of all combinations at once, from the last stage to the first: (K, ..., M), one K for each earlier stage.
    worth, cost = scores[-1].double(), torch.full_like(scores[-1], costs[-1], dtype=torch.float64)
    share, mean = worth.mean(), cost.mean()
    for stage in reversed(range(len(tried))):
        stops = (confidences[stage].double() >= tried[stage][:, None]).double()  # (K, M)
        score = scores[stage].double()
        if stage == 0:  # only means over images are needed, which are products
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


def fit_weights(own: Tensor, earlier: Tensor | None, dense: Tensor) -> tuple[float, float]:
    """Weights with which summed log-probabilities (M, classes) have the least KL from the dense ViT's, by Newton."""
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
def measure(cascade: Cascade, batches: Iterable[Batch], until: float | None = None) -> dict[str, Any]:
    """Accuracy of a cascade, its mean cost, and the share of images that stop at each stage.

    until: see Cascade.forward.
    """
    seen = []
    device = next(cascade.parameters()).device
    for batch in report.track(batches, "early exit"):
        *_, step = cascade(batch.images.to(device), until)
        right = step.logits.argmax(1).cpu() == batch.labels
        seen.append(torch.stack([each.cpu().double() for each in (right, step.macs, step.tokens)]))
    if not seen:
        raise InputError("no image could be read, so there is nothing to measure")
    right, spent, tokens = torch.cat(seen, 1)
    ends = torch.tensor(cascade.budgets).cumsum(0)
    return {
        "placement": "early-exit", "tokens": round(tokens.mean().item(), 1),
        "gmacs": spent.mean().item() / 1e9, **top1_row(right.mean().item(), len(right)), "images": len(right),
        "stopped": {int(end): round((tokens == end).double().mean().item(), 4) for end in ends},
    }  # fmt: skip
