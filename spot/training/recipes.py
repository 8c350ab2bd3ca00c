"""Training recipes: the paper's protocols (tab:all_config) and ours, as typed dataclasses.

A recipe is a frozen dataclass that validates its fields. Change a field with `override(recipe, {"lr": 1e-4})`, or on
the command line with `--set lr=1e-4`. To add a recipe, list an instance in ALL. Comments give the origin of values
that are not in the paper's table. Images use the checkpoint's normalisation, not the table's.
"""

import ast
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

from spot.errors import InputError, unknown


class Range(NamedTuple):
    """The values that a numeric field can have."""

    needed: str  # in error messages
    holds: Callable[[float], bool]


ABOVE_0 = Range("above 0 and finite", lambda number: 0 < number < math.inf)
AT_LEAST_0 = Range("at least 0 and finite", lambda number: 0 <= number < math.inf)
Count = Annotated[int, ABOVE_0]
Positive = Annotated[float, ABOVE_0]
NotNegative = Annotated[float, AT_LEAST_0]
Fraction = Annotated[float, Range("between 0 and 1", lambda number: 0 <= number <= 1)]
PositiveFraction = Annotated[float, Range("above 0 and at most 1", lambda number: 0 < number <= 1)]
FractionBelow1 = Annotated[float, Range("at least 0 and below 1", lambda number: 0 <= number < 1)]


@dataclass(frozen=True)
class Recipe:
    """The fields that all kinds of recipes share."""

    objective: ClassVar[str]  # the kind of loss, which the verbs accept or refuse

    name: str
    origin: str  # where the values come from

    batch_size: Count = 2048  # images per optimiser step, over all processes and accumulation
    epochs: Positive = 50
    img_size: Count = 224
    # One is drawn per step. The paper's equation uses uniform. Its table lists isotropic, which equals the grid at the
    # grid's number of tokens.
    priors: tuple[str, ...] = ("uniform",)

    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for random weights (spot/training/optim.py)
    lr: Positive = 6e-5  # peak learning rate, not scaled by the batch size
    betas: tuple[FractionBelow1, FractionBelow1] = (0.9, 0.99)
    weight_decay: NotNegative = 0.05  # not for vectors (biases, norms, class token); not in the paper's table
    llrd: PositiveFraction = 0.65  # layer-wise learning-rate decay: block i uses lr · llrd^i,
    faster: Literal["early", "late"] = "early"  # counted from the embedding (early) or from the head (late)
    head_rate: NotNegative = 1.0  # learning rate of the final norm and the head, relative to lr; 0 freezes them
    warmup_epochs: NotNegative = 5  # then cosine decay to 0
    warmup_shape: Literal["linear", "cosine"] = "linear"
    warmup_lr: NotNegative = 0.0
    clip_grad: Positive | None = None  # maximum gradient norm
    drop_path: FractionBelow1 = 0.1
    ema: FractionBelow1 = 0.0  # decay of the averaged weights per step; 0: off

    # Random resized crop: smallest and largest share of the image's area.
    crop_scale: tuple[PositiveFraction, PositiveFraction] = (0.08, 1.0)
    # RandAugment's magnitude and its standard deviation.
    randaug: tuple[Annotated[int, AT_LEAST_0], NotNegative] | None = (15, 0.5)
    mixup: NotNegative = 0.8  # α of the Beta distribution; 0: off
    cutmix: NotNegative = 1.0
    mix_share: Fraction = 1.0  # share of the batches (for distillation, of the images) that are mixed

    seed: int = 0
    precision: Literal["no", "bf16", "fp16"] = "no"
    compile: bool = False

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, convert(value, hints[field.name]))
            except ValueError as error:
                raise InputError(f"recipe field {field.name} must be {error}, got {value!r}") from None
        if self.crop_scale[0] > self.crop_scale[1]:
            raise InputError(f"recipe field crop_scale must be (least, most), got {self.crop_scale}")
        if not self.priors:
            raise InputError(f"recipe {self.name} needs a prior")


@dataclass(frozen=True)
class SupervisedRecipe(Recipe):
    """Cross-entropy with labels."""

    objective = "supervised"

    smoothing: FractionBelow1 = 0.1
    global_pool: Literal["token", "avg"] | None = None  # None: the ViT's own pooling
    budgets: tuple[Count, ...] = ()  # numbers of tokens, one drawn per step; (): the number of cells of the ViT's grid


@dataclass(frozen=True)
class DistilRecipe(Recipe):
    """Distillation, without labels, from the frozen dense ViT on its grid to the same ViT with off-grid tokens."""

    objective = "distil"

    # One forward pass per group; its number of tokens is drawn from the group for every step.
    budgets: tuple[tuple[Count, ...], ...] = ((25, 25, 36), (49, 49, 64), (81, 100, 100, 121), (196,))
    shares: tuple[PositiveFraction, ...] = (0.5, 1.0, 0.5, 0.25)  # share of the batch in each pass
    weights: tuple[NotNegative, ...] = (0.5, 1.0, 1.0, 1.5)  # of each pass's mean loss, which is larger for few tokens
    priors: tuple[str, ...] = ("isotropic",) * 5 + ("center", "center", "sobol", "uniform")
    scale_std: NotNegative | None = None  # standard deviation of window scales around "auto", relative to log tiling
    features: NotNegative = 1.0  # weight of the squared error of the token features
    balance: NotNegative = 0.5  # images have sampling weight count^−balance, by the class that the teacher predicts
    blend: Fraction = 1.0  # share of the weight change kept at the end; lower values restore some dense accuracy
    min_tokens: Count | None = None  # train budget-dependent weights (spot.Family): each pass uses the share of the
    # weight change for its number of tokens; with this many, the whole change. None: always the whole change

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.budgets) == len(self.shares) == len(self.weights) > 0:
            counts = f"{len(self.budgets)} budgets, {len(self.shares)} shares and {len(self.weights)} weights"
            raise InputError(f"recipe {self.name} needs as many of each and at least one, but has {counts}")
        if not all(self.budgets) or not any(self.weights):
            raise InputError(f"recipe {self.name} needs a budget in every group, and a weight above 0")


@dataclass(frozen=True)
class MaskedRecipe(Recipe):
    """Masked autoencoder: reconstruct hidden windows from the visible ones."""

    objective = "mae"

    visible: PositiveFraction = 0.25
    decoder_width: Count = 512
    decoder_depth: Count = 8
    decoder_heads: Count = 16


def convert(value: Any, hint: Any) -> Any:
    """Convert a value to a field's type: 4 to 4.0, a list to a tuple, one name to a tuple of names.

    Raises a ValueError that says what was needed.
    """
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        number, limits = convert(value, inner[0]), inner[1]
        if not limits.holds(number):
            raise ValueError(limits.needed)
        return number
    if NoneType in inner:  # an optional value
        try:
            return None if value is None else convert(value, inner[0])
        except ValueError as error:
            raise ValueError(f"{error} or none") from None
    if kind is tuple:
        values = value if isinstance(value, (tuple, list)) else (value,)
        types = [inner[0]] * len(values) if inner[-1] is Ellipsis else inner
        if len(values) != len(types):
            raise ValueError(f"{len(types)} values")
        return tuple(map(convert, values, types))
    if kind is Literal:
        if value not in inner:
            raise ValueError("one of " + ", ".join(inner))
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(hint.__name__)
    return value


# Above each recipe: the command, what it cost on our hardware, and the accuracy to expect.
# Not formatted, so that a recipe's values share lines.
# fmt: off

# spot retrofit vit_base_patch16_224.augreg_in1k --recipe cls-in1k --data imagenet --out runs/in1k
# 50 epochs of ImageNet-1k at 224 × 224 are days of one large GPU, or hours of eight; not run by us. See the paper's
# rows CLS-IN1k.
PAPER = SupervisedRecipe(
    name="cls-in1k",
    origin="SPoT paper, table of training protocols for retrofitting, CLS-IN1k; positions i.i.d. uniform, as its "
    "equation says",
)

# The same for vit_base_patch16_224.augreg2_in21k_ft_in1k, rows CLS-IN21k.
PAPER_21K = replace(PAPER, name="cls-in21k", origin=PAPER.origin.replace("CLS-IN1k", "CLS-IN21k"), drop_path=0.2)

# spot pretrain vit_base_patch16_224.mae --weights mae_pretrain_vit_base_full.pth --recipe mae-in1k --data imagenet \
#     --out runs/mae
# As long as cls-in1k. It has no accuracy of its own: fine-tune afterwards with mae-finetune.
MAE = MaskedRecipe(
    name="mae-in1k",
    origin=f"{PAPER.origin.replace('CLS', 'MAE')}; hidden pixels normalised as in He et al.",
    batch_size=4096, betas=(0.9, 0.95), lr=3e-3, drop_path=0.0, randaug=None, llrd=0.75,
)

# spot finetune runs/mae/model --recipe mae-finetune --data imagenet --out runs/mae-ft
# 100 epochs of ImageNet-1k are days of one large GPU; not run by us. See the paper's rows MAE-IN1k.
MAE_FINETUNE = SupervisedRecipe(
    name="mae-finetune",
    origin="He et al. (2022), table of end-to-end fine-tuning, ViT-B; the SPoT paper's footnote: cosine "
    "warm-up from 1e-7 to 1e-3, clipping 3. Here later layers learn faster, as is usual in fine-tuning",
    batch_size=1024, epochs=100, lr=1e-3, betas=(0.9, 0.999), faster="late", warmup_shape="cosine",
    warmup_lr=1e-7, clip_grad=3.0, randaug=(9, 0.5), global_pool="avg",
)

# spot finetune vit-ti --recipe finetune-small --data photos --out runs/mine
# 10 classes of 30 images: 56 steps, 9 seconds of one CPU core. 87.2 / 92.3 / 95.0 / 95.7 % at 25 / 49 / 100 / 196
# isotropic tokens (docs/results/ablations).
FINETUNE_SMALL = SupervisedRecipe(
    name="finetune-small",
    origin="ours: a retrofitted ViT on a few hundred images of one's own",
    batch_size=16, epochs=3, lr=5e-4, betas=(0.9, 0.999), llrd=0.75, faster="late", warmup_epochs=0.3,
    clip_grad=1.0, drop_path=0.0, crop_scale=(0.35, 1.0), randaug=None, mix_share=0.0,
    budgets=(16, 25, 25, 25, 36, 49, 49, 100), priors=("isotropic",) * 4 + ("center", "sobol", "uniform"),
)

# spot retrofit vit_tiny_patch16_224.augreg_in21k_ft_in1k --recipe distil --data images --out runs/tiny
# 5,500 images, 688 steps: 40 minutes of one CPU core. At 25 / 49 / 100 / 196 isotropic tokens, % of 2,000 validation
# images: ViT-Ti/16 39.3 / 57.4 / 67.5 / 72.6 (untrained 2.9 / 32.8 / 66.6 / 73.8), DeiT-Ti/16 42.4 / 57.8 / 66.4 /
# 71.3.
DISTIL = DistilRecipe(
    name="distil",
    origin="ours: the practical retrofit, from unlabelled images",
    batch_size=32, epochs=4, lr=3e-4, weight_decay=0.0, llrd=0.8, head_rate=0.0, warmup_epochs=0.2, clip_grad=1.0,
    drop_path=0.0, ema=0.995, crop_scale=(0.35, 1.0), randaug=None, cutmix=0.0, mix_share=0.5, blend=0.8,
)

# spot retrofit vit_tiny_patch16_224.augreg_in21k_ft_in1k --recipe distil-sizes --data images \
#     --leave-out tools/set_aside.txt --out runs/tiny-sizes
# 5,000 images, 1,562 steps in bfloat16: 40 minutes of one CPU core. As a delta with min_tokens=16: ViT-Ti/16 43.6 /
# 59.7 / 69.5 / 73.8, DeiT-Ti/16 (6 epochs) 45.8 / 59.2 / 67.8 / 71.3. Measured with three fixed views of each image,
# whose teacher outputs were cached (version 0.2, field views).
DISTIL_SIZES = replace(
    DISTIL,
    name="distil-sizes",
    origin="ours: distil, with windows that grow as tokens get fewer",
    epochs=10, lr=4e-4, warmup_epochs=0.3, ema=0.998, scale_std=0.22, shares=(0.75, 0.75, 0.4, 0.1875),
    weights=(0.6, 1.0, 1.0, 1.5), blend=1.0,
)

# spot retrofit vit-ti --recipe distil-again --data images --leave-out tools/set_aside.txt --out runs/tiny-again
# 5,000 images, 1,875 steps in bfloat16: 65 minutes of one CPU core. See spot/assets/RETROFITS.md.
DISTIL_AGAIN = replace(
    DISTIL,
    name="distil-again",
    origin="ours: continues from a retrofit and its policy, with budget-dependent weights (min_tokens=16)",
    epochs=12, lr=3e-4, warmup_epochs=0.3, ema=0.998, scale_std=0.22, blend=1.0, seed=2, min_tokens=16,
    budgets=((16, 25, 25, 36), (49, 49, 64), (81, 100, 100, 121)), shares=(0.75, 0.75, 0.5),
    weights=(0.6, 1.0, 1.0), priors=("isotropic",) * 4 + ("learned",) * 3 + ("center", "sobol", "uniform"),
)

# docs/training.md has the commands of both: 6 and 2 minutes of one CPU core. See spot/assets/README.md.
SCENES = SupervisedRecipe(
    name="scenes",
    origin="ours: nano ViTs on the built-in scenes, which never repeat; an epoch has 8,192 of them",
    batch_size=64, epochs=4, img_size=64, priors=("isotropic",), optimizer="muon", lr=3e-3, betas=(0.9, 0.95), llrd=1.0,
    warmup_epochs=0.25, clip_grad=1.0, drop_path=0.0, mix_share=0.0, randaug=None, smoothing=0.0,
)
SCENES_RETROFIT = replace(
    SCENES,
    name="scenes-retrofit",
    epochs=2.5, lr=1e-3, warmup_epochs=0.1, budgets=(9, 16, 16, 25, 36, 64),
    priors=("isotropic", "isotropic", "center", "sobol", "uniform"),
)

ALL: tuple[Recipe, ...] = (
    PAPER, PAPER_21K, MAE, MAE_FINETUNE, FINETUNE_SMALL, DISTIL, DISTIL_SIZES, DISTIL_AGAIN, SCENES, SCENES_RETROFIT,
)
# fmt: on
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in ALL}


def find_recipe(name: str) -> Recipe:
    """Look up a recipe by name."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe's objective, name and fields, without its origin: all that determines a run's outcome."""
    values = {name: value for name, value in asdict(recipe).items() if name != "origin"}
    return {"objective": recipe.objective, **values}


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A copy of a recipe with changed fields."""
    names = [field.name for field in fields(recipe) if field.name not in ("name", "origin")]
    for name in changes:
        if name not in names:
            raise unknown(f"field of recipe {recipe.name}", name, names)
    return replace(recipe, **changes)


def parse_assignments(words: Iterable[str], needed: str) -> dict[str, Any]:
    """Parse NAME=VALUE words. A value is a Python literal, true, false or none; any other text is kept as it is."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"{needed}, got {word!r}")
        values[name] = text
        with suppress(ValueError, SyntaxError):
            values[name] = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    return values
