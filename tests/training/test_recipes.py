import re

import pytest

from spot.errors import InputError
from spot.training.recipes import find_recipe, override, parse_assignments

# tab:all_config, typed from the paper: the three columns, but for the sampler, which is that of its equation.
# The optimiser's eps is in test_optim.py.
TABLE = """
sampler          uniform               uniform               uniform
batch size       2048                  2048                  4096
epochs           50                    50                    50
img.size         224                   224                   224
loss fn.         CE (0.1 smooth.)      CE (0.1 smooth.)      MSE
optimizer        AdamW                 AdamW                 AdamW
momentum         0.9, 0.99             0.9, 0.99             0.9, 0.95
lr.sched.        cos.decay (5 w.u.)    cos.decay (5 w.u.)    cos.decay (5 w.u.)
lr               6e-5                  6e-5                  3e-3
dropout path     0.1                   0.2                   0
augment          rrc / randaug(15, .5) rrc / randaug(15, .5) rrc
mixup            0.8                   0.8                   0.8
cutmix           1.0                   1.0                   1.0
llrd             0.65                  0.65                  0.75
"""
COLUMNS = ("cls-in1k", "cls-in21k", "mae-in1k")


def printed(recipe) -> dict[str, str]:
    """A recipe in the words of the paper's table."""
    loss = f"CE ({recipe.smoothing} smooth.)" if recipe.objective == "supervised" else "MSE"
    randaug = f" / randaug({recipe.randaug[0]}, {str(recipe.randaug[1]).lstrip('0')})" if recipe.randaug else ""
    return {
        "sampler": ", ".join(recipe.priors),
        "batch size": str(recipe.batch_size),
        "epochs": f"{recipe.epochs:g}",
        "img.size": str(recipe.img_size),
        "loss fn.": loss,
        "optimizer": {"adamw": "AdamW"}[recipe.optimizer],
        "momentum": "{}, {}".format(*recipe.betas),
        "lr.sched.": f"cos.decay ({recipe.warmup_epochs:g} w.u.)",
        "lr": f"{recipe.lr:.0e}".replace("e-0", "e-"),
        "dropout path": f"{recipe.drop_path:g}",
        "augment": "rrc" + randaug,
        "mixup": str(recipe.mixup),
        "cutmix": str(recipe.cutmix),
        "llrd": str(recipe.llrd),
    }


@pytest.mark.parametrize("column, name", enumerate(COLUMNS))
def test_every_value_of_the_papers_table_is_in_its_recipe(column, name):
    table = {}
    for line in TABLE.strip().splitlines():
        key, *values = re.split(r"\s{2,}", line.replace("AdamW ", "AdamW  ").replace(".5) rrc", ".5)  rrc"))
        table[key] = values[column]
    recipe = find_recipe(name)
    assert printed(recipe) == table
    assert not getattr(recipe, "budgets", ())  # as many tokens as the grid


def test_mae_fine_tuning_follows_the_papers_footnote():
    recipe = find_recipe("mae-finetune")
    assert (recipe.epochs, recipe.lr, recipe.clip_grad) == (100, 1e-3, 3)
    assert (recipe.warmup_shape, recipe.warmup_lr) == ("cosine", 1e-7)


def test_text_becomes_the_fields_type():
    words = "lr=1e-4 epochs=3 budgets=((4,9),(16,)) shares=[1,0.5] randaug=(9,0.5) precision=bf16 compile=true"
    changes = parse_assignments([*words.split(), "priors=isotropic"], "")
    recipe = override(find_recipe("distil"), {**changes, "weights": (1.0, 2)})
    assert (recipe.lr, recipe.budgets, recipe.shares) == (1e-4, ((4, 9), (16,)), (1.0, 0.5))
    assert (recipe.randaug, recipe.precision, recipe.compile) == ((9, 0.5), "bf16", True)
    assert recipe.epochs == 3.0 and isinstance(recipe.epochs, float)
    assert recipe.priors == ("isotropic",)
    assert override(recipe, parse_assignments(["randaug=none"], "")).randaug is None
    assert find_recipe("distil").lr == 3e-4  # the shipped one stays


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("epoch=1", "no field of recipe distil 'epoch'; did you mean 'epochs'"),
        ("name=x", "no field"),
        ("smoothing=0.1", "no field"),  # another objective's
        ("lr=fast", "lr must be float, got 'fast'"),
        ("batch_size=2.5", "batch_size must be int"),
        ("betas=(0.9,)", "betas must be 2 values"),
        ("faster=middle", "one of early, late"),
        ("lr=0", "above 0"),
        ("epochs=1e999", "epochs must be above 0 and finite, got inf"),
        ("betas=(2,3)", "betas must be at least 0 and below 1, got (2, 3)"),
        ("clip_grad=-1", "clip_grad must be above 0 and finite or none, got -1"),
        ("mix_share=7", "mix_share must be between 0 and 1, got 7"),
        ("budgets=((0,),(4,),(9,),(16,))", "budgets must be above 0"),
        ("randaug=(-1,0.5)", "randaug must be at least 0"),
        ("crop_scale=(0.9,0.1)", "crop_scale must be (least, most)"),
        ("priors=()", "a prior"),
        ("shares=(1.0,)", "4 budgets, 1 shares and 4 weights"),
        ("budgets=((),(4,),(9,),(16,))", "a budget in every group"),
        ("weights=(0,0,0,0)", "a weight above 0"),
    ],
)
def test_a_bad_change_is_one_sentence(change, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        override(find_recipe("distil"), parse_assignments([change], ""))


def test_an_unknown_recipe_suggests_the_near_one():
    with pytest.raises(InputError, match="'distil'"):
        find_recipe("distill")
