"""Recipes: the paper's training protocols (tab:all_config) and ours, as typed values.

A recipe is a frozen dataclass; change a field with `override(recipe, {"lr": "1e-4"})` or on the
command line with `--set lr=1e-4`. Where the paper's table is silent (weight decay, for example)
the comment says whose value is used. To add a recipe, list an instance in RECIPES.
"""

import ast
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spot.errors import InputError, unknown


@dataclass(frozen=True)
class Recipe:
    """What every kind of training needs."""

    name: str
    origin: str  # where the values come from
    cost: str  # hardware and time
    expected: str  # accuracy to expect
    command: str
    model: str  # the timm checkpoint it was made for

    batch_size: int = 2048  # images per optimiser step, over all processes and accumulation
    epochs: float = 50
    img_size: int = 224
    prior: str = "isotropic"  # the table's; the paper's equation says "uniform", i.i.d. for each image
    tokens: int | None = None  # None: as many as the ViT's grid has

    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: from nothing (spot/training/muon.py)
    lr: float = 6e-5  # at the top, for the whole batch: not scaled by batch size
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.05  # never on vectors (biases, norms, class token); not in the table
    llrd: float = 0.65  # layer-wise rate: block i learns at lr · llrd^i ...
    faster: Literal["early", "late"] = "early"  # ... counted from the embedding, or from the head
    head_rate: float = 1.0  # share of the rate for the final norm and the head; 0: they stay
    schedule: Literal["cosine"] = "cosine"
    warmup_epochs: float = 5
    warmup_shape: Literal["linear", "cosine"] = "linear"
    warmup_lr: float = 0.0
    min_lr: float = 0.0
    clip_grad: float | None = None  # largest norm of the gradient
    drop_path: float = 0.1
    ema: float = 0.0  # decay of the averaged weights per step; 0: none

    crop_scale: tuple[float, float] = (0.08, 1.0)  # random resized crop: share of the image's area
    randaug: tuple[int, float] | None = (15, 0.5)  # RandAugment's magnitude and its standard deviation
    flip: float = 0.5
    mixup: float = 0.8  # α of the Beta distribution; 0: off
    cutmix: float = 1.0
    mix_share: float = 1.0  # of the batches (or, for distillation, of the images) that are mixed

    seed: int = 0
    precision: Literal["no", "bf16", "fp16"] = "no"
    compile: bool = False

    @property
    def objective(self) -> str:
        return OBJECTIVES[type(self)]


@dataclass(frozen=True)
class Supervised(Recipe):
    """Cross-entropy with labels."""

    smoothing: float = 0.1
    global_pool: Literal["token", "avg"] | None = None  # None: as the ViT has it
    budgets: tuple[int, ...] = ()  # draw the step's tokens from these, instead of `tokens`
    priors: tuple[str, ...] = ()  # draw the step's prior from these, instead of `prior`


@dataclass(frozen=True)
class Distil(Recipe):
    """The frozen dense ViT on its grid teaches the same weights off the grid. No labels."""

    budgets: tuple[tuple[int, ...], ...] = ((25, 25, 36), (49, 49, 64), (81, 100, 100, 121), (196,))
    # ^ a reading of the images per group, its tokens drawn from the group at every step
    shares: tuple[float, ...] = (0.5, 1.0, 0.5, 0.25)  # of the batch that each reading takes
    weights: tuple[float, ...] = (0.5, 1.0, 1.0, 1.5)  # of each reading's mean loss: few tokens have large losses
    priors: tuple[str, ...] = ("isotropic",) * 5 + ("center", "center", "sobol", "uniform")
    jitter: float = 1.0  # isotropic and center tokens move by up to half this share of their spacing
    logits: float = 1.0  # weight of the KL divergence between teacher's and student's classes
    pooled: float = 1.0  # weight of 1 − cosine between the pooled features
    features: float = 1.0  # weight of the squared error of every token to the teacher's map, read where it stands
    depths: tuple[float, ...] = (1 / 3, 2 / 3, 11 / 12)  # after which share of the blocks tokens are compared
    temperature: float = 1.0
    balance: float = 0.5  # draw images with weight count^−balance, by the class the teacher predicts
    blend: float = 1.0  # in the end keep so much of the change; less gives back some of the dense accuracy


@dataclass(frozen=True)
class Masked(Recipe):
    """Masked autoencoder: a quarter of the windows is seen, the others are painted."""

    visible: float = 0.25
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    normalize: bool = True  # each hidden window's pixels to mean 0, variance 1, as the MAE paper does


OBJECTIVES: dict[type[Recipe], str] = {Supervised: "supervised", Distil: "distil", Masked: "mae"}

PAPER = "SPoT paper, table of training protocols for retrofitting"
GPUS = "50 epochs of ImageNet-1k at 224 × 224: days of one large GPU, or hours of eight; not run by us"

# The built-in models: nano ViTs on the built-in data set, where every scene is new and an epoch is 8,192 of them.
FRESH: dict[str, Any] = {
    "origin": "ours: nano ViTs on the built-in scenes",
    "model": "vit_tiny_patch16_224",
    "batch_size": 64,
    "img_size": 64,
    "optimizer": "muon",
    "betas": (0.9, 0.95),
    "llrd": 1.0,
    "clip_grad": 1.0,
    "drop_path": 0.0,
    "mix_share": 0.0,
    "randaug": None,
}
BUILT_IN = "spot/assets/README.md has what was measured"
SPARSE = (9, 16, 16, 25, 36, 64)
ANYWHERE = ("isotropic", "isotropic", "center", "sobol", "uniform")

SCENES: tuple[Recipe, ...] = (
    Supervised(
        name="scenes",
        **FRESH,
        cost="about 6 minutes of one CPU core",
        expected=BUILT_IN,
        command="spot pretrain vit_tiny_patch16_224 --fresh img_size=64 patch_size=8 embed_dim=128 depth=6 num_heads=4 "
        "num_classes=32 --recipe scenes --data scenes --out runs/scenes",
        epochs=4,
        lr=3e-3,
        warmup_epochs=0.25,
        smoothing=0.0,
    ),
    Supervised(
        name="scenes-retrofit",
        **FRESH,
        cost="about 2 minutes of one CPU core",
        expected=BUILT_IN,
        command="spot retrofit runs/scenes/model --recipe scenes-retrofit --data scenes --out runs/retrofitted",
        epochs=2.5,
        lr=1e-3,
        warmup_epochs=0.1,
        smoothing=0.0,
        budgets=SPARSE,
        priors=ANYWHERE,
    ),
    Distil(
        name="scenes-distil",
        **FRESH,
        cost="about 3 minutes of one CPU core",
        expected=BUILT_IN,
        command="spot retrofit runs/scenes/model --recipe scenes-distil --data scenes --out runs/distilled",
        epochs=1.5,
        lr=1e-3,
        warmup_epochs=0.1,
        budgets=((9, 16), (16, 25), (36, 49), (64,)),
        shares=(0.5, 0.5, 0.5, 0.25),
        weights=(1.0, 1.0, 1.0, 1.0),
        priors=ANYWHERE,
        balance=0.0,
    ),
    Masked(
        name="scenes-mae",
        **FRESH,
        cost="about 2 minutes of one CPU core",
        expected="no accuracy of its own: fine-tune afterwards with scenes-finetune",
        command="spot pretrain vit_tiny_patch16_224 --fresh img_size=64 patch_size=8 embed_dim=128 depth=6 num_heads=4 "
        "num_classes=32 --recipe scenes-mae --data scenes --out runs/mae",
        epochs=3,
        lr=3e-3,
        warmup_epochs=0.2,
        decoder_width=64,
        decoder_depth=2,
        decoder_heads=2,
    ),
    Supervised(
        name="scenes-finetune",
        **FRESH,
        cost="about 5 minutes of one CPU core",
        expected=BUILT_IN,
        command="spot finetune runs/mae/model --recipe scenes-finetune --data scenes --out runs/finetuned",
        epochs=3.5,
        lr=3e-3,
        warmup_epochs=0.2,
        smoothing=0.0,
        global_pool="avg",
    ),
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Supervised(
            name="cls-in1k",
            origin=f"{PAPER}, CLS-IN1k",
            cost=GPUS,
            expected="see the paper's CLS-IN1k rows",
            command="spot retrofit vit_base_patch16_224.augreg_in1k --recipe cls-in1k --data imagenet --out runs/in1k",
            model="vit_base_patch16_224.augreg_in1k",
        ),
        Supervised(
            name="cls-in21k",
            origin=f"{PAPER}, CLS-IN21k",
            cost=GPUS,
            expected="see the paper's CLS-IN21k rows",
            command="spot retrofit vit_base_patch16_224.augreg2_in21k_ft_in1k --recipe cls-in21k "
            "--data imagenet --out runs/in21k",
            model="vit_base_patch16_224.augreg2_in21k_ft_in1k",
            drop_path=0.2,
        ),
        Masked(
            name="mae-in1k",
            origin=f"{PAPER}, MAE-IN1k; hidden pixels normalised as in He et al.",
            cost=GPUS,
            expected="no accuracy of its own: fine-tune afterwards with mae-finetune",
            command="spot pretrain vit_base_patch16_224.mae --recipe mae-in1k --data imagenet --out runs/mae",
            model="vit_base_patch16_224.mae",
            batch_size=4096,
            betas=(0.9, 0.95),
            lr=3e-3,
            drop_path=0.0,
            randaug=None,
            llrd=0.75,
        ),
        Supervised(
            name="mae-finetune",
            origin="He et al. (2022), table of end-to-end fine-tuning, ViT-B; the SPoT paper's footnote: cosine "
            "warm-up from 1e-7 to 1e-3, clipping 3. Here later layers learn faster, as is usual in fine-tuning",
            cost="100 epochs of ImageNet-1k at 224 × 224: days of one large GPU; not run by us",
            expected="see the paper's MAE-IN1k rows",
            command="spot finetune runs/mae/model --recipe mae-finetune --data imagenet --out runs/mae-ft",
            model="vit_base_patch16_224.mae",
            batch_size=1024,
            epochs=100,
            lr=1e-3,
            betas=(0.9, 0.999),
            faster="late",
            warmup_shape="cosine",
            warmup_lr=1e-7,
            clip_grad=3.0,
            randaug=(9, 0.5),
            global_pool="avg",
        ),
        Distil(
            name="distil",
            origin="ours: the practical retrofit, from unlabelled images",
            cost="ViT-Ti/16 on 5,500 images, 688 steps: 40 minutes of one CPU core",
            expected="isotropic at 25 / 49 / 100 / 196 tokens, % of 2,000 validation images: ViT-Ti/16 39.3 / 57.4 / "
            "67.5 / 72.6 (untrained 2.9 / 32.8 / 66.6 / 73.8), DeiT-Ti/16 42.4 / 57.8 / 66.4 / 71.3",
            command="spot retrofit vit_tiny_patch16_224.augreg_in21k_ft_in1k --recipe distil "
            "--data images --out runs/tiny",
            model="vit_tiny_patch16_224.augreg_in21k_ft_in1k",
            batch_size=32,
            epochs=4,
            lr=3e-4,
            weight_decay=0.0,
            llrd=0.8,
            head_rate=0.0,
            warmup_epochs=0.2,
            clip_grad=1.0,
            drop_path=0.0,
            ema=0.995,
            crop_scale=(0.35, 1.0),
            randaug=None,
            cutmix=0.0,
            mix_share=0.5,
            blend=0.8,
        ),
        *SCENES,
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe of a name."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


DESCRIPTIVE = ("name", "origin", "cost", "expected", "command", "model")


def override(recipe: Recipe, changes: Mapping[str, str | Any]) -> Recipe:
    """A recipe with other values; text is read as the field's type, so `{"lr": "1e-4"}` will do."""
    hints = get_type_hints(type(recipe))
    known = [field.name for field in fields(recipe) if field.name not in DESCRIPTIVE]
    values = {}
    for name, value in changes.items():
        if name not in known:
            raise unknown(f"field of recipe {recipe.name}", name, known)
        values[name] = read(value, hints[name], name)
    return checked(replace(recipe, **values))


def read(value: Any, hint: Any, name: str) -> Any:
    """Text as a Python value of the type, or a sentence about what would be."""
    if isinstance(value, str) and hint is not str:
        with suppress(ValueError, SyntaxError):  # a bare word, such as one of a Literal's, stays as it is
            value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(value.lower(), value))
    fitted = fit(value, hint)
    if fitted is REFUSED:
        raise InputError(f"recipe field {name} must be {spell(hint)}, got {value!r}")
    return fitted


REFUSED = object()


def fit(value: Any, hint: Any) -> Any:
    """The value as the type has it (4 as 4.0, a list as a tuple), or REFUSED."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value if value in inner else REFUSED
    if kind in (Union, types.UnionType):
        return next((found for each in inner if (found := fit(value, each)) is not REFUSED), REFUSED)
    if kind is tuple:
        if not isinstance(value, (tuple, list)):
            return REFUSED
        wanted = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        parts = [fit(part, each) for part, each in zip(value, wanted, strict=False)]
        return REFUSED if len(value) != len(wanted) or any(part is REFUSED for part in parts) else tuple(parts)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is hint or (hint is type(None) and value is None) else REFUSED


def spell(hint: Any) -> str:
    """A type as a person writes its values."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    return str(getattr(hint, "__name__", hint) if not get_args(hint) else hint).replace("typing.", "")


def checked(recipe: Recipe) -> Recipe:
    """The recipe, if its values can be trained with."""
    for name in ("batch_size", "epochs", "img_size", "lr"):
        if not getattr(recipe, name) > 0:
            raise InputError(f"recipe field {name} must be above 0, got {getattr(recipe, name)}")
    for name in ("ema", "drop_path", "mix_share", "blend"):
        if not 0 <= getattr(recipe, name, 0) <= 1:
            raise InputError(f"recipe field {name} must be between 0 and 1, got {getattr(recipe, name)}")
    if recipe.tokens is not None and recipe.tokens < 1:
        raise InputError(f"recipe field tokens must be at least 1, got {recipe.tokens}")
    if isinstance(recipe, Distil) and not len(recipe.budgets) == len(recipe.shares) == len(recipe.weights):
        counts = f"{len(recipe.budgets)} budgets, {len(recipe.shares)} shares and {len(recipe.weights)} weights"
        raise InputError(f"recipe {recipe.name} needs as many of each, but has {counts}")
    if isinstance(recipe, Masked) and not 0 < recipe.visible < 1:
        raise InputError(f"recipe field visible must be between 0 and 1, got {recipe.visible}")
    return recipe


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON has it."""
    return {"objective": recipe.objective, **asdict(recipe)}


def decisive(recipe: Recipe) -> dict[str, Any]:
    """Its name and what decides a run's outcome: all but the words about it, which a new version may put better."""
    return {name: value for name, value in as_dict(recipe).items() if name == "name" or name not in DESCRIPTIVE}
