"""Objectives: the loss of a model on one part of a batch.

An objective is a module, so that accelerate can distribute it. Called with a part of a batch it returns the loss and
the number of correct predictions (NaN without labels). Random numbers depend on (seed, step, row) alone, so a batch
that is cut into parts, or divided over processes, is the same batch.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from timm.data import Mixup
from timm.data.mixup import mixup_target
from timm.loss import SoftTargetCrossEntropy
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from spot.draws import Draw, generator, seeded
from spot.errors import InputError
from spot.models.family import share_of_change
from spot.models.mae import MaskedAutoencoder, fill_decoder
from spot.models.spot_vit import Features, SpotViT
from spot.placement.priors import isotropic, omega, resolve_prior
from spot.placement.sizes import auto_scale, tiling_scale
from spot.training.batches import Part
from spot.training.recipes import DistilRecipe, MaskedRecipe, Recipe, SupervisedRecipe

T = TypeVar("T")
DEPTHS = (1 / 3, 2 / 3, 11 / 12)  # distillation compares tokens after these shares of the blocks


class Outcome(NamedTuple):
    """The loss to minimise, and the number of correct predictions (NaN without labels)."""

    loss: Tensor
    correct: Tensor


class Objective(nn.Module):
    """The base of all objectives: called with a Part they return an Outcome."""

    model: SpotViT

    def trained(self) -> SpotViT:
        """The model that is trained and saved."""
        return self.model

    def finish(self, model: SpotViT) -> SpotViT:
        """Change the trained model, or its average, before it is saved."""
        return model


class Supervised(Objective):
    """Cross-entropy on labels with smoothing, mixup and cutmix. Budget and prior are drawn for every step."""

    def __init__(self, model: SpotViT, recipe: SupervisedRecipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe
        self.budgets = recipe.budgets or (len(model.grid()),)
        check_priors(recipe, model)
        self.cross_entropy = SoftTargetCrossEntropy()

    def forward(self, part: Part) -> Outcome:
        if bool((part.labels < 0).any()):
            raise InputError("supervised training needs labels: one folder per class; without, use --recipe distil")
        images, targets = mix(self.recipe, part, classes=self.model.num_classes, smoothing=self.recipe.smoothing)
        draw = generator(self.recipe.seed, Draw.BUDGET, part.step)
        tokens, prior = one_of(self.budgets, draw), one_of(self.recipe.priors, draw)
        positions = place(self.model, self.recipe, prior, images, tokens, part)
        if self.recipe.object_shares and tokens < self.model.grid(images).shape[1]:
            share = one_of(self.recipe.object_shares, draw)
            positions = around_object(positions, images, part, share, self.recipe.seed)
        with seeded(self.recipe.seed, Draw.DROP, part.step, part.first):
            logits = self.model(images, positions)
        return Outcome(self.cross_entropy(logits.float(), targets), (logits.argmax(1) == part.labels).float().sum())


class Distil(Objective):
    """The frozen dense ViT teaches the same weights off the grid.

    The teacher sees an image on its grid. The student sees it in several forward passes, each with a budget and a
    prior drawn for the step. The loss is the sum of the KL divergence between the class probabilities, the cosine
    distance between the pooled features, and the squared error of every token, at three depths, against the teacher's
    feature map at the token's position. Some images are mixtures of two; the teacher's prediction is their target.
    """

    def __init__(self, model: SpotViT, recipe: DistilRecipe, teacher: SpotViT | None = None) -> None:
        """teacher: a model of the same shape, to continue an earlier retrofit; by default a copy of the model."""
        super().__init__()
        self.model, self.recipe = model, recipe
        check_priors(recipe, model)
        teacher = copy.deepcopy(model) if teacher is None else teacher
        if [tensor.shape for tensor in teacher.parameters()] != [tensor.shape for tensor in model.parameters()]:
            raise InputError(f"the teacher must be of the student's shape, but {teacher.name} is not {model.name}")
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list: not a submodule, so not trained or saved
        depth = len(model.vit.blocks)
        self.depths = sorted({max(0, round(share * depth) - 1) for share in DEPTHS})

    def forward(self, part: Part) -> Outcome:
        recipe, images = self.recipe, mix(self.recipe, part, mode="elem")[0]
        with torch.no_grad():
            target = self.predict(self._teacher[0].to(images.device), images, self.model.grid(images))
        loss = images.new_zeros(())
        for number, (share, weight) in enumerate(zip(recipe.shares, recipe.weights, strict=True)):
            rows = self.rows(share, number, part).to(images.device)
            if not len(rows):
                continue
            positions = self.place(images, number, part)[rows]
            share_of_weights = self.share_of_change(positions.shape[1], images)
            if not share_of_weights:
                continue
            with seeded(recipe.seed, Draw.DROP, part.step, part.first, number):
                predicted = self.student(images[rows], positions, share_of_weights, self.budget(number, part))
            # The mean over this pass's rows of the step's whole batch, however the batch is cut into parts.
            count = max(1, round(share * part.batch_size)) * len(images) / part.batch_size
            mean = self.difference(predicted, target.rows(rows), positions).sum() / count
            loss = loss + weight / sum(recipe.weights) * mean
        return Outcome(loss, loss.new_full((), math.nan))

    @torch.no_grad()
    def finish(self, model: SpotViT) -> SpotViT:
        """Interpolate between the teacher's weights and the trained ones."""
        if self.recipe.scale_std is not None:
            model.scale = "auto"
        for ours, theirs in zip(model.parameters(), self._teacher[0].parameters(), strict=True):
            ours.copy_(torch.lerp(theirs.to(ours), ours, self.recipe.blend))
        return model

    def rows(self, share: float, number: int, part: Part) -> Tensor:
        """The part's rows that are in a forward pass: a share of the step's batch, drawn for the step."""
        if share >= 1:
            return torch.arange(len(part.images))
        draw = generator(self.recipe.seed, Draw.SHARE, part.step, number)
        taken = torch.randperm(part.batch_size, generator=draw)[: max(1, round(share * part.batch_size))] - part.first
        return taken[(taken >= 0) & (taken < len(part.images))].sort().values

    def budget(self, number: int, part: Part) -> int:
        """The number of tokens of one forward pass in a step."""
        return one_of(self.recipe.budgets[number], generator(self.recipe.seed, Draw.BUDGET, part.step, number))

    def place(self, images: Tensor, number: int, part: Part) -> Tensor:
        """Positions of one forward pass for all rows: budget and prior drawn for the step, tokens for each row."""
        recipe, draw = self.recipe, generator(self.recipe.seed, Draw.BUDGET, part.step, number)
        tokens = one_of(recipe.budgets[number], draw)
        grid = self.model.grid(images)
        if tokens >= grid.shape[1]:
            return grid
        prior = one_of(recipe.priors, draw)
        positions = place(self.model, recipe, prior, images, tokens, part, number)[..., :2]
        if (prior in ("isotropic", "center") or resolve_prior(prior).learned) and recipe.jitter:
            # In half of the steps as the prior has them, otherwise each token moves within its cell.
            amount = recipe.jitter * max(0.0, float(2 * torch.rand((), generator=draw) - 1)) / math.sqrt(tokens)
            moves = part.select(torch.rand(part.batch_size, tokens, 2, generator=draw)) - 0.5
            positions = (positions + amount * moves.to(positions.device)).clamp(*omega(images))
        return torch.cat([positions, self.scales(images, tokens, part, number).to(positions)], -1)

    def scales(self, images: Tensor, tokens: int, part: Part, number: int) -> Tensor:
        """A window scale for each row, around "auto" and at most tiling: (b, N, 1), or (b, N, 0) without scale_std."""
        if self.recipe.scale_std is None:
            return torch.empty(len(images), tokens, 0)
        size, (height, width) = self.model.patch_size, images.shape[-2:]
        auto, tiling = (rule(tokens, height, width, size) for rule in (auto_scale, tiling_scale))
        draw = generator(self.recipe.seed, Draw.SCALE, part.step, number)
        deviation = self.recipe.scale_std * part.select(torch.randn(part.batch_size, generator=draw))
        scale = (auto * tiling**deviation).clamp(1, max(1.0, tiling))
        return scale[:, None, None].expand(-1, tokens, 1)

    def share_of_change(self, tokens: int, images: Tensor) -> float:
        """The share of the change that the weights for so many tokens have."""
        least = self.recipe.min_tokens
        return 1.0 if least is None else share_of_change(tokens, self.model.grid(images).shape[1], least)

    def student(self, images: Tensor, positions: Tensor, share: float, tokens: int) -> "Prediction":
        """The student's forward pass on some of the images (r, C, H, W), at positions (r, N, 2 or 3)."""
        return self.predict(self.model, images, positions, share)

    def predict(self, model: SpotViT, images: Tensor, positions: Tensor, share: float = 1.0) -> "Prediction":
        """A forward pass with the teacher's weights plus a share of the change."""
        run = Pass(model, self.depths)
        if share == 1:
            return run(images, positions)
        if model.vit.grad_checkpointing:
            raise InputError("a recipe with min_tokens swaps weights, which gradient checkpointing would not notice")
        base = dict(self._teacher[0].named_parameters())
        each = [(name, ours) for name, ours in model.named_parameters() if name in base]  # without a policy's
        weights = {f"model.{name}": torch.lerp(base[name].to(ours), ours, share) for name, ours in each}
        return functional_call(run, weights, (images, positions))

    def difference(self, predicted: "Prediction", target: "Prediction", positions: Tensor) -> Tensor:
        """The distance of each image's prediction from the teacher's: (b,)."""
        ours, theirs = (F.log_softmax(each.logits.float(), -1) for each in (predicted, target))
        loss = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(1)
        loss = loss + 1 - F.cosine_similarity(predicted.pooled.float(), target.pooled.float())
        if not self.recipe.features or not predicted.features:
            return loss
        weight = self.recipe.features / len(self.depths)
        for ours_at, theirs_at in zip(predicted.features, target.features, strict=True):
            expected = sample_map(theirs_at.tokens, self.model.grid_size, positions)
            loss = loss + weight * normalised_error(ours_at.tokens, expected)
            if ours_at.prefix.shape[1]:
                loss = loss + weight * normalised_error(ours_at.prefix, theirs_at.prefix)
        return loss


class Masked(Objective):
    """Reconstruct hidden windows from a visible share of them: mean squared error."""

    def __init__(self, model: SpotViT, recipe: MaskedRecipe, decoder: Mapping[str, Tensor] | None = None) -> None:
        """decoder: a published checkpoint, by its own names, whose decoder is trained further; by default a new one."""
        super().__init__()
        self.recipe = recipe
        check_priors(recipe, model)
        model.vit.head.requires_grad_(False)  # not used here
        with seeded(recipe.seed, Draw.DECODER):
            self.autoencoder = MaskedAutoencoder(
                model, width=recipe.decoder_width, depth=recipe.decoder_depth, heads=recipe.decoder_heads
            )
        if decoder is not None:
            fill_decoder(self.autoencoder.decoder, decoder)
        self.tokens = len(model.grid())
        self.visible = round(recipe.visible * self.tokens)
        if not 0 < self.visible < self.tokens:
            raise InputError(f"of {self.tokens} tokens a share of {recipe.visible} is not some and leaves none hidden")

    def trained(self) -> SpotViT:
        return self.autoencoder.encoder

    def forward(self, part: Part) -> Outcome:
        images, _ = mix(self.recipe, part)
        prior = one_of(self.recipe.priors, generator(self.recipe.seed, Draw.BUDGET, part.step))
        positions = place(self.trained(), self.recipe, prior, images, self.tokens, part)
        visible = self.choose(part).to(images.device)
        with seeded(self.recipe.seed, Draw.DROP, part.step, part.first):
            predicted, hidden = self.autoencoder(images, positions, visible)
        loss = (predicted - hidden).square().mean()
        return Outcome(loss, loss.new_full((), math.nan))

    def choose(self, part: Part) -> Tensor:
        """The tokens that each row of the part shows: (b, V)."""
        draw = generator(self.recipe.seed, Draw.SHOW, part.step)
        return part.select(torch.rand(part.batch_size, self.tokens, generator=draw)).argsort(1)[:, : self.visible]


OBJECTIVES: dict[str, Callable[..., Objective]] = {"supervised": Supervised, "distil": Distil, "mae": Masked}


class Pass(nn.Module):
    """A forward pass that keeps the tokens after a few blocks."""

    def __init__(self, model: SpotViT, depths: Sequence[int]) -> None:
        super().__init__()
        self.model, self.depths = model, depths

    def forward(self, images: Tensor, positions: Tensor) -> "Prediction":
        model = self.model
        features = model.token_features(images, positions, indices=[*self.depths, len(model.vit.blocks) - 1])
        last = features[-1]
        x = model.vit.norm(torch.cat([last.prefix, last.tokens], 1))
        return Prediction(model.forward_head(x), model.forward_head(x, pre_logits=True), features[: len(self.depths)])


class Prediction(NamedTuple):
    """Of a forward pass: logits (b, classes), pooled features (b, D), tokens after a few blocks."""

    logits: Tensor
    pooled: Tensor
    features: list[Features]

    def rows(self, rows: Tensor) -> "Prediction":
        """The prediction for some of the images."""
        taken = [Features(*(part[rows] for part in each)) for each in self.features]
        return Prediction(self.logits[rows], self.pooled[rows], taken)


def sample_map(tokens: Tensor, grid_size: tuple[int, int], positions: Tensor) -> Tensor:
    """A grid's features (b, rows × columns, D) at positions (b, N, 2), bilinear: (b, N, D).

    With scales, (b, N, 3), the mean over each window, less the one cell that bilinear sampling covers.
    """
    if positions.shape[-1] == 3:
        weights = [mean_weights(positions[..., axis], positions[..., 2], cells) for axis, cells in enumerate(grid_size)]
        return (weights[0][..., :, None] * weights[1][..., None, :]).flatten(2).to(tokens.dtype) @ tokens
    grid = tokens.transpose(1, 2).unflatten(2, grid_size)
    places = positions.flip(-1)[:, :, None] * 2 - 1  # grid_sample wants (x, y) in [-1, 1]
    sampled = F.grid_sample(grid, places.to(grid.dtype), padding_mode="border", align_corners=False)
    return sampled[..., 0].transpose(1, 2)


def mean_weights(positions: Tensor, scale: Tensor, cells: int) -> Tensor:
    """The weight of each of an axis's cells in the mean over windows: positions and scales (b, N) → (b, N, cells)."""
    points = 5  # of a window, along the axis
    steps = (torch.arange(points, device=positions.device) - (points - 1) / 2) / points
    at = positions[..., None] * cells - 0.5 + steps * (scale - 1).clamp(min=0)[..., None]
    distance = at.clamp(0, cells - 1)[..., None] - torch.arange(cells, device=positions.device)
    return (1 - distance.abs()).clamp(min=0).mean(-2)


def normalised_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean squared error of normalised vectors (b, N, D) → (b,), so that all blocks count alike."""
    width = ours.shape[-1:]
    error = F.layer_norm(ours.float(), width) - F.layer_norm(theirs.float(), width)
    return error.square().flatten(1).mean(1)


def one_of(options: Sequence[T], draw: Generator) -> T:
    """One of the options, each as likely as the others."""
    return options[int(torch.randint(len(options), (), generator=draw))]


def check_priors(recipe: Recipe, model: SpotViT) -> None:
    """Refuse a prior that does not exist, or that needs maps or a policy which is not there."""
    for name in recipe.priors:
        prior = resolve_prior(name)
        if prior.learned:
            model.resolved_prior(name)  # refuses a model without a policy
        elif prior.needs_map:
            raise InputError(f"training draws positions without looking at images, but the prior {name} needs maps")


def place(model: SpotViT, recipe: Recipe, prior: str, images: Tensor, tokens: int, part: Part, *numbers: int) -> Tensor:
    """Positions for a part's rows: drawn for the whole batch, or predicted by the model's policy from each image."""
    if resolve_prior(prior).learned:
        return model.resolved_prior(prior)(images, tokens).detach()
    batch = images[:1].expand(part.batch_size, *images.shape[1:])
    draw = generator(recipe.seed, Draw.PLACE, part.step, *numbers)
    return part.select(model.place(batch, tokens=tokens, prior=prior, generator=draw))


def around_object(positions: Tensor, images: Tensor, part: Part, share: float, seed: int) -> Tensor:
    """Positions (b, N, 2) of which the first share is moved into a square around each scene's object.

    The square has a side of 32 to 96 pixels and a centre up to a sixth of that from the object's. Tokens in it are
    even but for half a cell.
    """
    if part.centers is None:
        raise InputError("tokens can be placed around an object where it is known: in scenes, not in other images")
    tokens, size = round(share * positions.shape[1]), torch.tensor(images.shape[-2:])
    if not tokens:
        return positions
    draw, count = generator(seed, Draw.NEAR, part.step), part.batch_size
    side = 32 * 3 ** part.select(torch.rand(count, 1, 1, generator=draw)) / size
    shift = part.select(torch.rand(count, 1, 2, generator=draw)) - 0.5
    moves = (part.select(torch.rand(count, tokens, 2, generator=draw)) - 0.5) / tokens**0.5
    corner = (part.centers[:, None].cpu() + (shift / 3 - 0.5) * side).clamp(min=0).minimum(1 - side)
    inside = (corner + side * (isotropic(images[:1, :, :8, :8].cpu(), tokens) + moves)).to(positions)
    return torch.cat([inside, positions[:, tokens:, :2]], 1).clamp(*omega(images))


def mix(
    recipe: Recipe, part: Part, *, classes: int = 1, smoothing: float = 0.0, mode: str = "batch"
) -> tuple[Tensor, Tensor]:
    """A part's images, mixed in pairs within the part by timm's mixup and cutmix, and their soft targets.

    mode: "batch" mixes all or none of the part, "elem" some of its images.
    """
    labels = part.labels.clamp(0, classes - 1)
    if not recipe.mix_share or not (recipe.mixup or recipe.cutmix):
        return part.images, mixup_target(labels, classes, 1.0, smoothing)
    if len(part.images) % 2:
        count = len(part.images)
        raise InputError(f"mixup pairs images, so {count} at a time is odd; use an even number or mix_share=0")
    how = {"prob": recipe.mix_share, "mode": mode, "label_smoothing": smoothing, "num_classes": classes}
    mixup = Mixup(recipe.mixup, recipe.cutmix, **how)
    with seeded(recipe.seed, Draw.MIX, part.step, part.first):
        return mixup(part.images.clone(), labels)
