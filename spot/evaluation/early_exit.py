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
    time     like `cost` with measured time: the stages take turns on one image, on one thread
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spot import report
from spot.data.loader import Batch
from spot.errors import InputError
from spot.evaluation.accuracy import top1_row, wilson
from spot.evaluation.cost import image_shape, macs
from spot.evaluation.throughput import Clock, cpu_threads, interleaved
from spot.models.cascade import Cascade, Stage, predict_stage, stage_model
from spot.models.family import Family, Source, at_budget, dense_model
from spot.models.tome_schedule import four_blocks, merge_share
from spot.models.wrappers import TokenModel

BUDGET_SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the grid: default budgets of the stages before it
# Merging options of a stage: this share of its tokens, from this share of the blocks on.
GRID_MERGES = ((0.72, 5 / 12), (0.65, 1 / 3), (0.82, 1 / 3), (0.74, 1 / 4), (0.83, 1 / 4), (0.8, 1 / 6))
EARLY_MERGES = ((0.7, 1 / 4), (0.8, 1 / 4))
FEW_BLOCKS_MERGES = (0.5, 0.6, 0.7)  # for goals in time, these shares are merged in few blocks instead
WARM_UP, ROUNDS = 2, 15  # of timing
MAX_EARLY_STAGES = 2  # before the grid
QUANTILES = 100  # of a stage's confidence: the thresholds that are tried

# Makes the model of a stage callable in a runtime, from the model and whether it is the last stage.
Runner = Callable[[TokenModel, bool], Callable[[Any], Any]]
# A possible stage with its model. In lists of them those of the grid come last, the unmerged one first.
Candidate = tuple[Stage, TokenModel]


class Predicted(NamedTuple):
    """Predictions for M images in each of S possible stages, and the dense ViT's."""

    stages: Tensor  # (S, M, classes) log-probabilities
    dense: Tensor  # (M, classes) log-probabilities
    labels: Tensor  # (M,) int64, -1 if unknown
    keys: Sequence[str] = ()  # M


class Calibrated(NamedTuple):
    """The chosen stages, with their results on the calibration images."""

    stages: tuple[Stage, ...]
    agreed: float  # the share of images on which the cascade agrees with the dense ViT
    lost: float  # expected loss of accuracy under the dense ViT's probabilities
    macs: float  # mean multiply-adds
    cost: float  # as a share of the dense ViT's multiply-adds or, for goals in time, of its time


def possible_stages(
    source: Source, budgets: Sequence[int], *, merge: bool = True, prior: str | None = None, few_blocks: bool = False
) -> list[Candidate]:
    """All possible stages of a cascade: every budget, then the grid, each without and with merging.

    few_blocks: merge in few blocks, which takes less time.
    """
    found = []
    dense = dense_model(source)
    cells, depth = len(dense.grid()), len(dense.vit.blocks)
    for tokens in (*budgets, cells):
        grid = tokens == cells
        model = dense if grid else at_budget(source, tokens, prior=prior)
        plain = Stage(tokens, macs(model.at(prior="isotropic") if grid else model))
        found.append((plain, stage_model(model, plain, grid=grid)))
        for merged in merge_schedules(tokens, depth, grid=grid, few_blocks=few_blocks) if merge else ():
            try:
                merging = stage_model(model, replace(plain, merged=merged), grid=grid)
            except InputError:  # a ViT whose tokens cannot be merged
                break
            found.append((replace(plain, merged=merged, macs=macs(merging)), merging))
    return found


def merge_schedules(tokens: int, depth: int, *, grid: bool, few_blocks: bool) -> list[tuple[int, ...]]:
    """The amounts of merging that are tried for a stage: how many tokens each block merges away."""
    if few_blocks:
        options = [(share, four_blocks(depth)) for share in FEW_BLOCKS_MERGES]
    else:
        merges = GRID_MERGES if grid else EARLY_MERGES
        options = [(share, set(range(round(begin * depth), depth))) for share, begin in merges]
    schedules = (tuple(merge_share(share, blocks, tokens, depth)) for share, blocks in options)
    return [schedule for schedule in dict.fromkeys(schedules) if any(schedule)]


@torch.no_grad()
def predict_all(candidates: Sequence[Candidate], batches: Iterable[Batch], *, mirror: bool = False) -> Predicted:
    """Run every possible stage on every image.

    mirror: also run on horizontally flipped images, as additional images.
    """
    made, labels = [], []
    keys: list[str] = []
    tokens = [stage.tokens for stage, _ in candidates]
    device = next(candidates[0][1].parameters()).device
    for batch in report.track(batches, "calibrating"):
        given = batch.images.to(device)
        for images in (given, given.flip(-1)) if mirror else (given,):
            logits = torch.stack([model(images) for _, model in candidates])
            made.append(logits.float().log_softmax(2).cpu())
            labels.append(batch.labels)
            keys += batch.keys
    if not keys:
        raise InputError("no image could be read, so there is nothing to calibrate on")
    stages = torch.cat(made, 1)
    dense = stages[tokens.index(tokens[-1])]
    return Predicted(stages, dense, torch.cat(labels), keys)


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
    runner: Runner = lambda model, last: partial(predict_stage, model, last=last),
) -> Cascade:
    """Choose the cheapest cascade that is nearly as accurate as the dense ViT.

    Args:
        source: a family, whose dense ViT is the original one, or a model.
        batches: images; their labels are not used.
        budgets: of the stages before the grid, from which at most two are chosen; by default BUDGET_SHARES of the grid.
        lose: the largest expected loss of accuracy; 0.01 is one point.
        agree: instead, the required agreement with the dense ViT, as a share of the images.
        cost: instead, the largest share of the dense ViT's multiply-adds.
        time: instead, the largest share of the dense ViT's latency for one image, measured on this machine.
        merge: allow stages to merge similar tokens (ToMe).
        prior: the placement; by default the model's own.
        runner: the runtime that is timed; by default eager PyTorch.
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
    budgets = sorted(set(budgets or (math.ceil(cells * share) for share in BUDGET_SHARES)))
    if budgets[0] < 1 or budgets[-1] >= cells:
        raise InputError(f"budgets are from 1 to below the grid's {cells} tokens, got {tuple(budgets)}")
    candidates = possible_stages(source, budgets, merge=merge, prior=prior, few_blocks=time is not None)
    stages = [stage for stage, _ in candidates]
    # The best of many cascades is overestimated on its own images; twice as many images reduce this bias.
    predicted = predict_all(candidates, batches, mirror=True)
    seconds = None if time is None else stage_seconds(candidates, runner)
    max_cost = cost if time is None else time
    chosen = choose_cascade(predicted, stages, lose=lose, agree=agree, max_cost=max_cost, seconds=seconds)
    dense = next(stage.macs for stage in stages if stage.tokens == cells)
    images = len(predicted.dense) // 2
    low, high = wilson(chosen.agreed, images)
    made = {
        "images": images, **(shares or {"lose": lose}), **({} if time is None else {"took": chosen.cost}),
        "agreed": chosen.agreed, "low": low, "high": high, "lost": chosen.lost,
        "macs": chosen.macs / dense, "budgets": list(budgets), "merge": merge,
    }  # fmt: skip
    return Cascade(source, chosen.stages, prior=prior, calibration=made)


class Combination(NamedTuple):
    """The stages of a cascade with fitted weights and no thresholds, and what each of them predicts for M images."""

    stages: tuple[Stage, ...] = ()
    classes: tuple[Tensor, ...] = ()  # (M,) each
    confidences: tuple[Tensor, ...] = ()  # (M,) each


def fit_combinations(predicted: Predicted, possible: Sequence[Stage]) -> list[Combination]:
    """All cascades of at most MAX_EARLY_STAGES budgets and the grid, with fitted weights of log-probabilities."""
    cells = max(stage.tokens for stage in possible)
    last = [index for index, stage in enumerate(possible) if stage.tokens == cells]
    early = [index for index in range(len(possible)) if index not in last]

    def extended(cascade: Combination, known: Tensor, index: int) -> tuple[Combination, Tensor]:
        """A cascade with one more stage, and the summed log-probabilities (M, classes) after it."""
        logits = predicted.stages[index]
        weights = fit_weights(logits, known if cascade.stages else None, predicted.dense)
        stage = replace(possible[index], weight=weights[0], earlier_weight=weights[1])
        known = stage.add(logits, known)
        confidence, classes = known.softmax(1).max(1)
        stages, confidences = (*cascade.stages, stage), (*cascade.confidences, confidence)
        return Combination(stages, (*cascade.classes, classes), confidences), known

    longest = [(Combination(), torch.zeros_like(predicted.dense))]
    beginnings = longest
    for _ in range(MAX_EARLY_STAGES):
        longest = [
            extended(cascade, known, index)
            for cascade, known in longest
            for index in early
            if not cascade.stages or cascade.stages[-1].tokens < possible[index].tokens
        ]
        beginnings = beginnings + longest
    return [extended(*beginning, index)[0] for beginning in beginnings for index in last]


def choose_cascade(
    predicted: Predicted,
    possible: Sequence[Stage],
    *,
    lose: float = 0.01,
    agree: float | None = None,
    max_cost: float | None = None,
    fitted: Sequence[Combination] | None = None,
    seconds: Mapping[tuple[Any, ...], float] | None = None,
) -> Calibrated:
    """The cheapest cascade that reaches the goal, or the best one that costs at most `max_cost`; see the module.

    Args:
        max_cost: the largest share of the dense ViT's cost.
        fitted: the result of `fit_combinations`, if it is known.
        seconds: time of each stage, by tokens and merges; used as the cost instead of multiply-adds.
    """

    def cost_of(stage: Stage) -> float:
        return stage.macs if seconds is None else seconds[stage.tokens, stage.merged]

    dense_classes, probabilities = predicted.dense.argmax(1), predicted.dense.exp()

    def score(classes: Tensor) -> Tensor:
        """The expected accuracy, or agreement, of predicted classes (M,), per image."""
        return probabilities.gather(1, classes[:, None])[:, 0] if agree is None else (classes == dense_classes).float()

    dense_cost = cost_of(max(possible, key=lambda stage: stage.tokens))  # the first of the grid, without merging
    if max_cost is not None:
        min_score, limit = -math.inf, max_cost * dense_cost
    else:
        min_score, limit = score(dense_classes).mean().item() - (lose if agree is None else 1 - agree), math.inf
    reaching: list[tuple[Combination, Thresholds]] = []
    for cascade in fit_combinations(predicted, possible) if fitted is None else fitted:
        scores, costs = [score(classes) for classes in cascade.classes], [cost_of(stage) for stage in cascade.stages]
        if (found := find_thresholds(cascade.confidences, scores, costs, min_score, limit)) is not None:
            reaching.append((cascade, found))
    if not reaching:  # only if `max_cost` is too small: otherwise the grid alone qualifies
        raise InputError(f"no cascade costs at most {max_cost} of the dense ViT; begin with fewer tokens")
    cascade, found = min(reaching, key=lambda pair: pair[1].cost if max_cost is None else -pair[1].score)
    values = (*found.values, 0.0)
    stages = tuple(replace(stage, threshold=value) for stage, value in zip(cascade.stages, values, strict=True))
    confident = [confidence >= value for confidence, value in zip(cascade.confidences, values, strict=True)]
    exits = torch.stack(confident).byte().argmax(0)  # the first stage with a confident prediction, per image (M,)
    classes = torch.stack(cascade.classes).gather(0, exits[None])[0]
    mean = torch.tensor([stage.macs for stage in stages]).cumsum(0)[exits].double().mean().item()
    lost = (probabilities.amax(1) - probabilities.gather(1, classes[:, None])[:, 0]).mean().item()
    agreed = (classes == dense_classes).double().mean().item()
    return Calibrated(stages, agreed, lost, mean, found.cost / dense_cost)


@torch.no_grad()
def stage_seconds(candidates: Sequence[Candidate], runner: Runner) -> dict[tuple[Any, ...], float]:
    """The time of each stage on one image, with its placement, by tokens and merges: medians of rounds in turns.

    On a CPU this is the processor time of one thread.
    """
    cells, model = candidates[-1][0].tokens, candidates[0][1]
    images = torch.randn(1, *image_shape(model), device=next(model.parameters()).device)
    clock: Clock = "processor" if images.device.type == "cpu" else "wall"
    with cpu_threads(1):
        calls = {(stage.tokens, stage.merged): runner(model, stage.tokens == cells) for stage, model in candidates}
        interleaved(calls, images, WARM_UP)
        return {key: median(seconds) for key, seconds in interleaved(calls, images, ROUNDS, clock).items()}


class Thresholds(NamedTuple):
    """Thresholds of all stages but the last, with the resulting mean score and mean cost."""

    values: tuple[float, ...]
    score: float
    cost: float


def find_thresholds(
    confidences: Sequence[Tensor],
    scores: Sequence[Tensor],
    costs: Sequence[float],
    min_score: float,
    max_cost: float = math.inf,
) -> Thresholds | None:
    """The cheapest thresholds with at least this mean score; with `max_cost`, the best mean score within it.

    confidences and scores: (M,) for every stage. Returns None if no thresholds qualify.
    """
    levels = torch.linspace(0, 1, QUANTILES + 1, dtype=torch.float64)
    tried = [torch.cat([each.double().quantile(levels), levels.new_tensor([2.0])]) for each in confidences[:-1]]
    # Outcomes of all combinations at once, from the last stage to the first: (K, ..., M), one K for each earlier stage.
    score, cost = scores[-1].double(), torch.full_like(scores[-1], costs[-1], dtype=torch.float64)
    mean_score, mean_cost = score.mean(), cost.mean()
    for stage in reversed(range(len(tried))):
        stops = (confidences[stage].double() >= tried[stage][:, None]).double()  # (K, M)
        here = scores[stage].double()
        if stage == 0:  # only means over images are needed, which are products
            later = (1 - stops) / len(here)
            mean_score = later @ score.reshape(-1, len(here)).T + (stops * here).mean(1, keepdim=True)
            mean_cost = costs[0] + later @ cost.reshape(-1, len(here)).T
            mean_score, mean_cost = (mean.view(len(stops), *score.shape[:-1]) for mean in (mean_score, mean_cost))
            break
        stops = stops.view(len(stops), *[1] * (score.dim() - 1), -1)
        score, cost = stops * here + (1 - stops) * score, costs[stage] + (1 - stops) * cost
    reached = (mean_score >= min_score - 1e-9) & (mean_cost <= max_cost)
    if not reached.any():
        return None
    objective = mean_cost if max_cost == math.inf else -mean_score
    best = torch.unravel_index(objective.where(reached, math.inf).argmin(), mean_cost.shape) if tried else ()
    values = tuple(each[index].item() for each, index in zip(tried, best, strict=True))
    return Thresholds(values, mean_score[best].item(), mean_cost[best].item())


def fit_weights(logits: Tensor, earlier: Tensor | None, dense: Tensor) -> tuple[float, float]:
    """Weights of a stage's log-probabilities (M, classes) and of the sum before it, with least KL from the dense ViT's.

    Fitted by Newton's method.
    """
    parts = torch.stack([logits] if earlier is None else [logits, earlier], -1).double()  # (M, classes, 1 or 2)
    weights = torch.zeros(parts.shape[-1], dtype=torch.float64)
    weights[0] = 1.0
    target = torch.einsum("mc,mck->mk", dense.double().exp(), parts)
    for _ in range(20):
        p = (parts @ weights).softmax(1)
        mean = torch.einsum("mc,mck->mk", p, parts)
        gradient = (mean - target).mean(0)
        hessian = (torch.einsum("mc,mck,mcl->kl", p, parts, parts) - mean.T @ mean) / len(parts)
        step = torch.linalg.solve(hessian + 1e-6 * torch.eye(len(weights)), gradient)
        weights = weights - step
        if step.abs().max() < 1e-6:
            break
    return weights[0].item(), weights[1].item() if earlier is not None else 0.0


@torch.no_grad()
def measure(cascade: Cascade, batches: Iterable[Batch], until: float | None = None) -> dict[str, Any]:
    """Accuracy of a cascade, its mean cost, and the share of images that stop at each stage.

    until: see Cascade.forward.
    """
    outcomes = []
    device = next(cascade.parameters()).device
    for batch in report.track(batches, "early exit"):
        *_, step = cascade(batch.images.to(device), until)
        right = step.logits.argmax(1).cpu() == batch.labels
        outcomes.append(torch.stack([each.cpu().double() for each in (right, step.macs, step.tokens)]))
    if not outcomes:
        raise InputError("no image could be read, so there is nothing to measure")
    right, cost, tokens = torch.cat(outcomes, 1)
    ends = torch.tensor(cascade.budgets).cumsum(0)
    return {
        "placement": "early-exit", "tokens": round(tokens.mean().item(), 1),
        "gmacs": cost.mean().item() / 1e9, **top1_row(right.mean().item(), len(right)), "images": len(right),
        "stopped": {int(end): round((tokens == end).double().mean().item(), 4) for end in ends},
    }  # fmt: skip
