"""Objectives: what a model is trained to do with one part of a batch.

An objective is a module, so that accelerate can distribute it: called with a part of a batch it
returns the loss and the number of images it got right (NaN where there are no labels). All chance
comes from (seed, step, row), so a batch cut into parts or over processes is the same batch.
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
from spot.training.batches import Part, Targets
from spot.training.recipes import DistilRecipe, MaskedRecipe, Recipe, SupervisedRecipe

T = TypeVar("T")


class Outcome(NamedTuple):
    """The loss to minimise, and how many images were classified right (NaN without labels)."""

    loss: Tensor
    correct: Tensor


class Objective(nn.Module):
    """What all objectives have: called with a Part they return an Outcome."""

    model: SpotViT

    def trained(self) -> SpotViT:
        """The model that training improves, and that is kept in the end."""
        return self.model

    def finish(self, model: SpotViT) -> SpotViT:
        """A last touch to the trained model, or to its average, before it is kept."""
        return model


class Supervised(Objective):
    """Cross-entropy on labels with smoothing, mixup and cutmix, at the recipe's prior and budget or drawn ones."""

    def __init__(self, model: SpotViT, recipe: SupervisedRecipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe
        self.budgets = recipe.budgets or (recipe.tokens or len(model.grid()),)
        self.priors = trainable(recipe.priors or (recipe.prior,), model)
        self.cross_entropy = SoftTargetCrossEntropy()

    def forward(self, part: Part) -> Outcome:
        if bool((part.labels < 0).any()):
            raise InputError("supervised training needs labels: one folder per class; without, use --recipe distil")
        images, targets = mix(self.recipe, part, classes=self.model.num_classes, smoothing=self.recipe.smoothing)
        draw = generator(self.recipe.seed, Draw.BUDGET, part.step)
        tokens, prior = one_of(self.budgets, draw), one_of(self.priors, draw)
        positions = place(self.model, self.recipe, prior, images, tokens, part)
        if self.recipe.near and tokens < self.model.grid(images).shape[1]:
            positions = around_object(positions, images, part, one_of(self.recipe.near, draw), self.recipe.seed)
        with seeded(self.recipe.seed, Draw.DROP, part.step, part.first):
            logits = self.model(images, positions)
        return Outcome(self.cross_entropy(logits.float(), targets), (logits.argmax(1) == part.labels).float().sum())


class Distil(Objective):
    """The frozen dense ViT teaches the same weights off the grid.

    The teacher sees an image on its grid; the student sees it in several forward passes, each with a
    budget and a prior drawn for the step. Three things are compared: the classes (KL divergence), the
    pooled feature that the head gets (cosine), and, after a few blocks, every token with the teacher's
    feature map at the token's position, averaged over a large window. Images are crops and mixtures: the
    teacher says what a mixture is, so no labels are needed.
    """

    def __init__(self, model: SpotViT, recipe: DistilRecipe, teacher: SpotViT | None = None) -> None:
        """teacher: another model of the same shape, to go on with an earlier retrofit; else the model as it is now."""
        super().__init__()
        self.model, self.recipe = model, recipe
        trainable(recipe.priors, model)
        teacher = copy.deepcopy(model) if teacher is None else teacher
        if [tensor.shape for tensor in teacher.parameters()] != [tensor.shape for tensor in model.parameters()]:
            raise InputError(f"the teacher must be of the student's shape, but {teacher.name} is not {model.name}")
        self.targets: Targets | None = None  # where the run keeps what the teacher said of fixed views
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list: not a part, so neither trained nor saved
        depth = len(model.vit.blocks)
        self.depths = sorted({max(0, min(depth, round(share * depth)) - 1) for share in recipe.depths})

    def forward(self, part: Part) -> Outcome:
        recipe = self.recipe
        images = part.images if part.views is not None else mix(recipe, part, mode="elem")[0]
        target = self.target(images, part.views)
        loss = images.new_zeros(())
        for number, (share, weight) in enumerate(zip(recipe.shares, recipe.weights, strict=True)):
            rows = self.rows(share, number, part).to(images.device)
            if not len(rows):
                continue
            positions = self.place(images, number, part)[rows]
            part_of_change = self.share(positions.shape[1], images)
            if not part_of_change:
                continue
            with seeded(recipe.seed, Draw.DROP, part.step, part.first, number):
                predicted = self.student(images[rows], positions, part_of_change, self.budget(number, part))
            # The mean over the rows that this pass takes of the step's whole batch, however that is cut.
            taken = max(1, round(share * part.of)) * len(images) / part.of
            mean = self.difference(predicted, target.of(rows), positions).sum() / taken
            loss = loss + weight / sum(recipe.weights) * mean
        return Outcome(loss, loss.new_full((), math.nan))

    @torch.no_grad()
    def finish(self, model: SpotViT) -> SpotViT:
        """Go back a little towards the teacher, in a straight line through the weights."""
        if self.recipe.sizes is not None:
            model.scale = "auto"
        for ours, theirs in zip(model.parameters(), self._teacher[0].parameters(), strict=True):
            ours.copy_(torch.lerp(theirs.to(ours), ours, self.recipe.blend))
        return model

    @torch.no_grad()
    def target(self, images: Tensor, views: Tensor | None) -> "Prediction":
        """What the teacher says of images on its grid; of fixed views (b,) it is asked once."""
        teacher = self._teacher[0].to(images.device)
        if self.targets is None or views is None:
            return self.predict(teacher, images, self.model.grid(images))
        unknown = self.targets.unknown(views)
        if len(unknown):
            new = images[unknown.to(images.device)]
            self.targets.write(views[unknown], self.predict(teacher, new, self.model.grid(new)).named())
        return Prediction.of_named(self.targets.read(views), self.model.grid(images), images.device)

    def rows(self, share: float, number: int, part: Part) -> Tensor:
        """Which of the part's rows a forward pass takes: a share of the step's batch, drawn for the step."""
        if share >= 1:
            return torch.arange(len(part.images))
        order = torch.randperm(part.of, generator=generator(self.recipe.seed, Draw.SHARE, part.step, number))
        taken = order[: max(1, round(share * part.of))] - part.first
        return taken[(taken >= 0) & (taken < len(part.images))].sort().values

    def budget(self, number: int, part: Part) -> int:
        """How many tokens one forward pass has in a step."""
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
            # Half of the time as the prior has them, otherwise each token moves within its cell.
            amount = recipe.jitter * max(0.0, float(2 * torch.rand((), generator=draw) - 1)) / math.sqrt(tokens)
            moves = part.own(torch.rand(part.of, tokens, 2, generator=draw)) - 0.5
            positions = (positions + amount * moves.to(positions.device)).clamp(*omega(images))
        return torch.cat([positions, self.scales(images, tokens, part, number).to(positions)], -1)

    def scales(self, images: Tensor, tokens: int, part: Part, number: int) -> Tensor:
        """One scale for each row's windows, around "auto" and at most tiling: (b, N, 1), or (b, N, 0) without sizes."""
        if self.recipe.sizes is None:
            return torch.empty(len(images), tokens, 0)
        size, (height, width) = self.model.patch_size, images.shape[-2:]
        middle, tiling = (rule(tokens, height, width, size) for rule in (auto_scale, tiling_scale))
        draw = generator(self.recipe.seed, Draw.SCALE, part.step, number)
        spread = self.recipe.sizes * part.own(torch.randn(part.of, generator=draw))
        scale = (middle * tiling**spread).clamp(1, max(1.0, tiling))
        return scale[:, None, None].expand(-1, tokens, 1)

    def share(self, tokens: int, images: Tensor) -> float:
        """How much of the change a forward pass with so many tokens has."""
        least = self.recipe.min_tokens
        return 1.0 if least is None else share_of_change(tokens, self.model.grid(images).shape[1], least)

    def student(self, images: Tensor, positions: Tensor, share: float, tokens: int) -> "Prediction":
        """The student's forward pass on some of the images (r, C, H, W), at positions (r, N, 2 or 3)."""
        return self.predict(self.model, images, positions, share)

    def predict(self, model: SpotViT, images: Tensor, positions: Tensor, share: float = 1.0) -> "Prediction":
        """One forward pass, with the teacher's weights and a share of the change."""
        run = Pass(model, self.depths)
        if share == 1:
            return run(images, positions)
        if model.vit.grad_checkpointing:
            raise InputError("a recipe with min_tokens swaps weights, which gradient checkpointing would not notice")
        base = dict(self._teacher[0].named_parameters())
        each = [(name, ours) for name, ours in model.named_parameters() if name in base]  # a policy is no part of it
        weights = {f"model.{name}": torch.lerp(base[name].to(ours), ours, share) for name, ours in each}
        return functional_call(run, weights, (images, positions))

    def difference(self, predicted: "Prediction", target: "Prediction", positions: Tensor) -> Tensor:
        """How far each image's prediction is from the teacher's: (b,)."""
        recipe, temperature = self.recipe, self.recipe.temperature
        ours, theirs = (F.log_softmax(each.logits.float() / temperature, -1) for each in (predicted, target))
        loss = recipe.logits * temperature**2 * F.kl_div(ours, theirs, log_target=True, reduction="none").sum(1)
        loss = loss + recipe.pooled * (1 - F.cosine_similarity(predicted.pooled.float(), target.pooled.float()))
        if not recipe.features or not predicted.features:
            return loss
        weight = recipe.features / len(self.depths)
        for ours_at, theirs_at in zip(predicted.features, target.features, strict=True):
            expected = sample_map(theirs_at.tokens, self.model.grid_size, positions)
            loss = loss + weight * normalised_error(ours_at.tokens, expected)
            if ours_at.prefix.shape[1]:
                loss = loss + weight * normalised_error(ours_at.prefix, theirs_at.prefix)
        return loss


class Masked(Objective):
    """Reconstruct hidden windows from a visible share of them: mean squared error."""

    def __init__(self, model: SpotViT, recipe: MaskedRecipe, decoder: Mapping[str, Tensor] | None = None) -> None:
        """decoder: a published checkpoint, by its own names, whose decoder goes on learning; else a new one begins."""
        super().__init__()
        self.recipe = recipe
        trainable([recipe.prior], model)
        model.vit.head.requires_grad_(False)  # not used here
        with seeded(recipe.seed, Draw.DECODER):
            self.autoencoder = MaskedAutoencoder(
                model, width=recipe.decoder_width, depth=recipe.decoder_depth, heads=recipe.decoder_heads
            )
        if decoder is not None:
            fill_decoder(self.autoencoder.decoder, decoder)
        self.tokens = recipe.tokens or len(model.grid())
        self.visible = round(recipe.visible * self.tokens)
        if not 0 < self.visible < self.tokens:
            raise InputError(f"of {self.tokens} tokens a share of {recipe.visible} is not some and leaves none hidden")

    def trained(self) -> SpotViT:
        return self.autoencoder.encoder

    def forward(self, part: Part) -> Outcome:
        images, _ = mix(self.recipe, part)
        positions = place(self.trained(), self.recipe, self.recipe.prior, images, self.tokens, part)
        visible = self.choose(part).to(images.device)
        with seeded(self.recipe.seed, Draw.DROP, part.step, part.first):
            predicted, hidden = self.autoencoder(images, positions, visible, normalize=self.recipe.normalize)
        loss = (predicted - hidden).square().mean()
        return Outcome(loss, loss.new_full((), math.nan))

    def choose(self, part: Part) -> Tensor:
        """Which tokens each row of the part shows: (b, V)."""
        draw = torch.rand(part.of, self.tokens, generator=generator(self.recipe.seed, Draw.SHOW, part.step))
        return part.own(draw).argsort(1)[:, : self.visible]


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

    def named(self) -> dict[str, Tensor]:
        """All of it as tensors by name; positions are the grid's, and not among them."""
        named = {"logits": self.logits, "pooled": self.pooled}
        for at, each in enumerate(self.features):
            named |= {f"tokens{at}": each.tokens, f"prefix{at}": each.prefix}
        return named

    @classmethod
    def of_named(cls, values: Mapping[str, Tensor], grid: Tensor, device: torch.device) -> "Prediction":
        """What `named` was made of, on a device."""
        values = {name: tensor.to(device) for name, tensor in values.items()}
        depths = sum(name.startswith("tokens") for name in values)
        features = [Features(values[f"tokens{at}"], values[f"prefix{at}"], grid) for at in range(depths)]
        return cls(values["logits"], values["pooled"], features)

    def of(self, rows: Tensor) -> "Prediction":
        """Those of some images."""
        taken = [Features(*(part[rows] for part in each)) for each in self.features]
        return Prediction(self.logits[rows], self.pooled[rows], taken)


def sample_map(tokens: Tensor, grid_size: tuple[int, int], positions: Tensor) -> Tensor:
    """A grid's features (b, rows × columns, D) at positions (b, N, 2), bilinear: (b, N, D).

    With scales, (b, N, 3), the mean over each window: as large as it is beyond the one cell that bilinear means.
    """
    if positions.shape[-1] == 3:
        weights = [mean_weights(positions[..., axis], positions[..., 2], cells) for axis, cells in enumerate(grid_size)]
        return (weights[0][..., :, None] * weights[1][..., None, :]).flatten(2).to(tokens.dtype) @ tokens
    grid = tokens.transpose(1, 2).unflatten(2, grid_size)
    places = positions.flip(-1)[:, :, None] * 2 - 1  # grid_sample wants (x, y) in [-1, 1]
    sampled = F.grid_sample(grid, places.to(grid.dtype), padding_mode="border", align_corners=False)
    return sampled[..., 0].transpose(1, 2)


def mean_weights(positions: Tensor, scale: Tensor, cells: int) -> Tensor:
    """What each of an axis's cells weighs in the mean over windows: positions and scales (b, N) → (b, N, cells)."""
    points = 5  # of a window, along the axis
    steps = (torch.arange(points, device=positions.device) - (points - 1) / 2) / points
    at = positions[..., None] * cells - 0.5 + steps * (scale - 1).clamp(min=0)[..., None]
    distance = at.clamp(0, cells - 1)[..., None] - torch.arange(cells, device=positions.device)
    return (1 - distance.abs()).clamp(min=0).mean(-2)


def normalised_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean squared error of normalised vectors (b, N, D) → (b,): scale-free, so that all blocks count alike."""
    width = ours.shape[-1:]
    error = F.layer_norm(ours.float(), width) - F.layer_norm(theirs.float(), width)
    return error.square().flatten(1).mean(1)


def one_of(options: Sequence[T], draw: Generator) -> T:
    """One of the options, each as likely as the others."""
    return options[int(torch.randint(len(options), (), generator=draw))]


def trainable(priors: Sequence[str], model: SpotViT) -> Sequence[str]:
    """Refuse a prior that does not exist, or needs maps or a policy that is not there, before training begins."""
    for name in priors:
        prior = resolve_prior(name)
        if prior.learned:
            model.resolved_prior(name)  # refuses a model without a policy
        elif prior.needs_map:
            raise InputError(f"training draws positions without looking at images, but the prior {name} needs maps")
    return priors


def place(model: SpotViT, recipe: Recipe, prior: str, images: Tensor, tokens: int, part: Part, *numbers: int) -> Tensor:
    """Positions for a part's rows: drawn for the whole batch, or where the model's policy looks in each image."""
    if resolve_prior(prior).learned:
        return model.resolved_prior(prior)(images, tokens).detach()
    batch = images[:1].expand(part.of, *images.shape[1:])
    draw = generator(recipe.seed, Draw.PLACE, part.step, *numbers)
    return part.own(model.place(batch, tokens=tokens, prior=prior, generator=draw))


def around_object(positions: Tensor, images: Tensor, part: Part, share: float, seed: int) -> Tensor:
    """Positions (b, N, 2) of which the first share is moved into a square around each scene's object.

    The square is 32 to 96 pixels a side and its middle up to a sixth of that from the object's; in it tokens
    are even but for half a cell. So a model learns to use windows that another one has placed.
    """
    if part.centers is None:
        raise InputError("tokens can be placed around an object where it is known: in scenes, not in other images")
    tokens, size = round(share * positions.shape[1]), torch.tensor(images.shape[-2:])
    if not tokens:
        return positions
    draw = generator(seed, Draw.NEAR, part.step)
    side = 32 * 3 ** part.own(torch.rand(part.of, 1, 1, generator=draw)) / size
    shift = part.own(torch.rand(part.of, 1, 2, generator=draw)) - 0.5
    moves = (part.own(torch.rand(part.of, tokens, 2, generator=draw)) - 0.5) / tokens**0.5
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
