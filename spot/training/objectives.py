"""Training objectives: the loss of a model on a micro-batch.

An objective is a module, so that accelerate can distribute it. Its forward pass maps a micro-batch to the loss and
the number of correct predictions (NaN without labels). Random numbers depend only on (seed, step, row), so splitting a
batch into micro-batches, or over processes, does not change it.
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
from spot.placement.priors import omega, resolve_prior
from spot.placement.sizes import auto_scale, tiling_scale
from spot.training.batches import MicroBatch
from spot.training.recipes import DistilRecipe, MaskedRecipe, Recipe, SupervisedRecipe

T = TypeVar("T")
DEPTHS = (1 / 3, 2 / 3, 11 / 12)  # relative depths at which distillation compares tokens


class Outcome(NamedTuple):
    """The loss to minimise, and the number of correct predictions (NaN without labels)."""

    loss: Tensor
    correct: Tensor


class Objective(nn.Module):
    """Base class of all objectives. The forward pass maps a MicroBatch to an Outcome."""

    model: SpotViT

    def trained(self) -> SpotViT:
        """The model that is trained and saved."""
        return self.model

    def finish(self, model: SpotViT) -> SpotViT:
        """Post-process the trained model, or its weight average, before it is saved."""
        return model


class Supervised(Objective):
    """Cross-entropy with label smoothing, mixup and cutmix. Every step draws a budget and a prior."""

    def __init__(self, model: SpotViT, recipe: SupervisedRecipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe
        self.budgets = recipe.budgets or (len(model.grid()),)
        check_priors(recipe, model)
        self.cross_entropy = SoftTargetCrossEntropy()

    def forward(self, batch: MicroBatch) -> Outcome:
        if bool((batch.labels < 0).any()):  # some samples of shards may have none
            raise InputError("supervised training needs labels: one folder per class; without, use --recipe distil")
        classes, smoothing = self.model.num_classes, self.recipe.smoothing
        images, targets = apply_mixup(self.recipe, batch, classes=classes, smoothing=smoothing)
        positions = self.place(images, batch, generator(self.recipe.seed, Draw.BUDGET, batch.step))
        with seeded(self.recipe.seed, Draw.DROP, batch.step, batch.first):
            logits = self.model(images, positions)
        return Outcome(self.cross_entropy(logits.float(), targets), (logits.argmax(1) == batch.labels).float().sum())

    def place(self, images: Tensor, batch: MicroBatch, draw: Generator) -> Tensor:
        """Positions (b, N, 2). The budget and the prior are drawn for the step."""
        tokens, prior = one_of(self.budgets, draw), one_of(self.recipe.priors, draw)
        return draw_positions(self.model, self.recipe, prior, images, tokens, batch)


class Distil(Objective):
    """Distillation from the frozen dense ViT on its grid to the same ViT with off-grid tokens.

    The student processes a batch in several forward passes, each with a budget and a prior drawn for the step. The loss
    sums the KL divergence between class probabilities, the cosine distance between pooled features, and the squared
    error of the tokens. Each token is compared, at three depths, with the teacher's feature map at its position. Some
    images are mixtures of two images; their target is the teacher's prediction.
    """

    def __init__(self, model: SpotViT, recipe: DistilRecipe, teacher: SpotViT | None = None) -> None:
        """teacher: a model of the same shape, to continue an earlier retrofit. Default: a copy of the model."""
        super().__init__()
        self.model, self.recipe = model, recipe
        check_priors(recipe, model)
        teacher = copy.deepcopy(model) if teacher is None else teacher
        if [tensor.shape for tensor in teacher.parameters()] != [tensor.shape for tensor in model.parameters()]:
            raise InputError(f"the teacher must be of the student's shape, but {teacher.name} is not {model.name}")
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list: not a submodule, so not trained or saved
        depth = len(model.vit.blocks)
        self.depths = sorted({max(0, round(share * depth) - 1) for share in DEPTHS})

    def forward(self, batch: MicroBatch) -> Outcome:
        recipe, images = self.recipe, apply_mixup(self.recipe, batch, mode="elem")[0]
        with torch.no_grad():
            target = FeaturePass(self._teacher[0].to(images.device), self.depths)(images, self.model.grid(images))
        loss = images.new_zeros(())
        for number, (share, weight) in enumerate(zip(recipe.shares, recipe.weights, strict=True)):
            rows = self.rows(share, number, batch).to(images.device)
            if not len(rows):
                continue
            positions = self.place(images, number, batch)[rows]
            change = 1.0
            if recipe.min_tokens is not None:
                change = share_of_change(positions.shape[1], self.model.grid(images).shape[1], recipe.min_tokens)
            if not change:
                continue
            with seeded(recipe.seed, Draw.DROP, batch.step, batch.first, number):
                predicted = self.student(images[rows], positions, change, self.budget(number, batch)[0])
            # The mean over this pass's images in the whole batch, independent of how the batch is split.
            count = max(1, round(share * batch.batch_size)) * len(images) / batch.batch_size
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

    def rows(self, share: float, number: int, batch: MicroBatch) -> Tensor:
        """Indices of the images in a forward pass, which uses a random share of the step's batch."""
        draw = generator(self.recipe.seed, Draw.SHARE, batch.step, number)
        count = max(1, round(share * batch.batch_size))
        rows = torch.randperm(batch.batch_size, generator=draw)[:count] - batch.first
        return rows[(rows >= 0) & (rows < len(batch.images))].sort().values

    def budget(self, number: int, batch: MicroBatch) -> tuple[int, Generator]:
        """The number of tokens of one forward pass in a step, and the generator of the draws that follow."""
        draw = generator(self.recipe.seed, Draw.BUDGET, batch.step, number)
        return one_of(self.recipe.budgets[number], draw), draw

    def place(self, images: Tensor, number: int, batch: MicroBatch) -> Tensor:
        """Positions of one forward pass for all images. Budget and prior are drawn per step, positions per image."""
        recipe, (tokens, draw) = self.recipe, self.budget(number, batch)
        grid = self.model.grid(images)
        if tokens >= grid.shape[1]:
            return grid
        prior = one_of(recipe.priors, draw)
        positions = draw_positions(self.model, recipe, prior, images, tokens, batch, number)[..., :2]
        if prior in ("isotropic", "center") or resolve_prior(prior).learned:
            # Half of the steps use the prior's positions. In the others each token moves within its cell.
            amount = max(0.0, float(2 * torch.rand((), generator=draw) - 1)) / math.sqrt(tokens)
            moves = batch.select(torch.rand(batch.batch_size, tokens, 2, generator=draw)) - 0.5
            positions = (positions + amount * moves.to(positions.device)).clamp(*omega(images))
        if recipe.scale_std is None:
            return positions
        # Window scales per image are drawn around "auto", at most tiling.
        size = (*images.shape[-2:], self.model.patch_size)
        auto, tiling = auto_scale(tokens, *size), tiling_scale(tokens, *size)
        draw = generator(recipe.seed, Draw.SCALE, batch.step, number)
        deviation = recipe.scale_std * batch.select(torch.randn(batch.batch_size, generator=draw))
        scale = (auto * tiling**deviation).clamp(1, max(1.0, tiling))
        return torch.cat([positions, scale[:, None, None].expand(-1, tokens, 1).to(positions)], -1)

    def student(self, images: Tensor, positions: Tensor, share: float, tokens: int) -> "DistilOutput":
        """The student's forward pass on some of the images (r, C, H, W), at positions (r, N, 2 or 3).

        share: how far its weights are interpolated from the teacher's (0) to its own (1).
        tokens: the budget, for students that do not get one window for each token.
        """
        student = FeaturePass(self.model, self.depths)
        if share == 1:
            return student(images, positions)
        if self.model.vit.grad_checkpointing:
            raise InputError("a recipe with min_tokens interpolates weights, which excludes gradient checkpointing")
        base = dict(self._teacher[0].named_parameters())
        weights = {
            f"model.{name}": torch.lerp(base[name].to(ours), ours, share)
            for name, ours in self.model.named_parameters()
            if name in base  # not the policy's
        }
        return functional_call(student, weights, (images, positions))

    def difference(self, predicted: "DistilOutput", target: "DistilOutput", positions: Tensor) -> Tensor:
        """The distillation loss of each image: (b,)."""
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
    """Masked autoencoding: the mean squared error of hidden windows, reconstructed from the visible ones."""

    def __init__(self, model: SpotViT, recipe: MaskedRecipe, decoder: Mapping[str, Tensor] | None = None) -> None:
        """decoder: a published checkpoint, with its own names, whose decoder is fine-tuned. Default: a new decoder."""
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
            raise InputError(f"visible={recipe.visible} of {self.tokens} tokens must leave some visible, some hidden")

    def trained(self) -> SpotViT:
        return self.autoencoder.encoder

    def forward(self, batch: MicroBatch) -> Outcome:
        images, _ = apply_mixup(self.recipe, batch)
        prior = one_of(self.recipe.priors, generator(self.recipe.seed, Draw.BUDGET, batch.step))
        positions = draw_positions(self.trained(), self.recipe, prior, images, self.tokens, batch)
        visible = self.draw_visible(batch).to(images.device)
        with seeded(self.recipe.seed, Draw.DROP, batch.step, batch.first):
            predicted, hidden = self.autoencoder(images, positions, visible)
        loss = (predicted - hidden).square().mean()
        return Outcome(loss, loss.new_full((), math.nan))

    def draw_visible(self, batch: MicroBatch) -> Tensor:
        """Indices of the visible tokens of each image: (b, V)."""
        draw = generator(self.recipe.seed, Draw.SHOW, batch.step)
        return batch.select(torch.rand(batch.batch_size, self.tokens, generator=draw)).argsort(1)[:, : self.visible]


OBJECTIVES: dict[type[Recipe], Callable[..., Objective]] = {
    SupervisedRecipe: Supervised,
    DistilRecipe: Distil,
    MaskedRecipe: Masked,
}


class FeaturePass(nn.Module):
    """A forward pass that also returns the tokens after some of the blocks."""

    def __init__(self, model: SpotViT, depths: Sequence[int]) -> None:
        super().__init__()
        self.model, self.depths = model, depths

    def forward(self, images: Tensor, positions: Tensor) -> "DistilOutput":
        model = self.model
        features = model.token_features(images, positions, indices=[*self.depths, len(model.vit.blocks) - 1])
        last = features[-1]
        x = model.vit.norm(torch.cat([last.prefix, last.tokens], 1))
        return DistilOutput(model.forward_head(x), model.forward_head(x, pre_logits=True), features[: len(self.depths)])


class DistilOutput(NamedTuple):
    """The result of a forward pass: logits (b, classes), pooled features (b, D), tokens after some blocks."""

    logits: Tensor
    pooled: Tensor
    features: list[Features]

    def rows(self, rows: Tensor) -> "DistilOutput":
        """The prediction for some of the images."""
        features = [Features(*(tensor[rows] for tensor in each)) for each in self.features]
        return DistilOutput(self.logits[rows], self.pooled[rows], features)


def sample_map(tokens: Tensor, grid_size: tuple[int, int], positions: Tensor) -> Tensor:
    """Bilinear samples of a grid's features (b, rows × columns, D) at positions (b, N, 2): (b, N, D).

    With scales, (b, N, 3), they are means over each window, reduced by the one cell that a bilinear sample covers.
    """
    if positions.shape[-1] == 3:
        weights = [mean_weights(positions[..., axis], positions[..., 2], cells) for axis, cells in enumerate(grid_size)]
        return (weights[0][..., :, None] * weights[1][..., None, :]).flatten(2).to(tokens.dtype) @ tokens
    grid = tokens.transpose(1, 2).unflatten(2, grid_size)
    places = positions.flip(-1)[:, :, None] * 2 - 1  # grid_sample expects (x, y) in [-1, 1]
    sampled = F.grid_sample(grid, places.to(grid.dtype), padding_mode="border", align_corners=False)
    return sampled[..., 0].transpose(1, 2)


def mean_weights(positions: Tensor, scale: Tensor, cells: int) -> Tensor:
    """Weights of the cells along an axis in the means over windows: positions and scales (b, N) → (b, N, cells)."""
    points = 5  # samples of a window along the axis
    steps = (torch.arange(points, device=positions.device) - (points - 1) / 2) / points
    at = positions[..., None] * cells - 0.5 + steps * (scale - 1).clamp(min=0)[..., None]
    distance = at.clamp(0, cells - 1)[..., None] - torch.arange(cells, device=positions.device)
    return (1 - distance.abs()).clamp(min=0).mean(-2)


def normalised_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean squared error of normalised vectors (b, N, D) → (b,). Normalisation gives all blocks equal weight."""
    width = ours.shape[-1:]
    error = F.layer_norm(ours.float(), width) - F.layer_norm(theirs.float(), width)
    return error.square().flatten(1).mean(1)


def one_of(options: Sequence[T], draw: Generator) -> T:
    """Draw one of the options uniformly."""
    return options[int(torch.randint(len(options), (), generator=draw))]


def check_priors(recipe: Recipe, model: SpotViT) -> None:
    """Refuse unknown priors, priors that need saliency maps, and the learned prior without a policy."""
    for name in recipe.priors:
        prior = resolve_prior(name)
        if prior.learned:
            model.resolved_prior(name)  # refuses a model without a policy
        elif prior.needs_map:
            raise InputError(f"the prior {name} needs maps, but training computes no saliency; use another prior")


def draw_positions(
    model: SpotViT, recipe: Recipe, prior: str, images: Tensor, tokens: int, batch: MicroBatch, *numbers: int
) -> Tensor:
    """Positions for a micro-batch: drawn for the step's whole batch, or predicted by the model's policy."""
    if resolve_prior(prior).learned:
        return model.resolved_prior(prior)(images, tokens).detach()
    whole = images[:1].expand(batch.batch_size, *images.shape[1:])
    draw = generator(recipe.seed, Draw.PLACE, batch.step, *numbers)
    return batch.select(model.place(whole, tokens=tokens, prior=prior, generator=draw))


def apply_mixup(
    recipe: Recipe, batch: MicroBatch, *, classes: int = 1, smoothing: float = 0.0, mode: str = "batch"
) -> tuple[Tensor, Tensor]:
    """Apply timm's mixup and cutmix to pairs of images. Returns the images and their soft targets.

    mode: "batch" mixes all images or none, "elem" mixes some of them.
    """
    labels = batch.labels.clamp(0, classes - 1)
    if not recipe.mix_share or not (recipe.mixup or recipe.cutmix):
        return batch.images, mixup_target(labels, classes, 1.0, smoothing)
    if len(batch.images) % 2:
        raise InputError(
            f"mixup needs an even number of images per pass, got {len(batch.images)}; change it or use mix_share=0"
        )
    options = {"prob": recipe.mix_share, "mode": mode, "label_smoothing": smoothing, "num_classes": classes}
    mixup = Mixup(recipe.mixup, recipe.cutmix, **options)
    with seeded(recipe.seed, Draw.MIX, batch.step, batch.first):
        return mixup(batch.images.clone(), labels)
