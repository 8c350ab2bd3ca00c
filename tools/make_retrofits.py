"""Retrofit two real ViTs without labels: python -m tools.make_retrofits WEIGHTS TRAIN VAL.

WEIGHTS holds timm's files (NAME.safetensors), TRAIN unlabelled photographs, VAL validation images that no training
uses. For each ViT:

1. `spot retrofit` runs with two seeds, without the images of tools/set_aside.txt. Their weights are averaged.
2. `spot learn` trains a policy for the mean, and `spot retrofit` continues with the recipe distil-again.
3. The midpoint of both is written to spot/assets: a delta whose weights depend on the budget, with its policy, and a
   cascade that is calibrated on the images set aside.
4. On these images, without labels, the agreement with the dense ViT is measured for shares of the change.
5. The original ViT, the delta and its parts are measured on VAL, and RETROFITS.md and models.json are written.

Runs are kept in --runs: finished ones are skipped, and interrupted ones resume.
"""

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import spot
from paper.program import SET_ASIDE, images_set_aside, program
from paper.provenance import comment
from spot import report
from spot.data.loader import loader
from spot.evaluation.accuracy import Setting, evaluate
from spot.models.checkpoints import save_folder
from spot.models.family import Family, delta_policy, save_delta
from spot.models.shipped import CASCADE
from spot.store import read_json, write_json, write_text
from tools.make_assets import ASSETS, call, curve, epochs_of, measured, record

# What is changed in the recipe distil-sizes for each: bfloat16 is twice as fast on a CPU that has it.
RETROFITS: dict[str, tuple[str, ...]] = {
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": ("precision=bf16",),
    "deit_tiny_patch16_224.fb_in1k": ("precision=bf16", "epochs=6", "ema=0.996"),
}
# What is changed in distil-again.
AGAIN: dict[str, tuple[str, ...]] = {
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": ("precision=bf16",),
    "deit_tiny_patch16_224.fb_in1k": ("precision=bf16", "epochs=7"),
}
SEEDS = (0, 1)
BUDGETS = (25, 49, 100, 196)
MIN_TOKENS = 16  # of 9, 16 and 25 the one with the lowest cross-entropy at every budget on the images set aside
SHARES = (0.25, 0.5, 0.75, 1.0)
EARLY, COST = (49, 64, 81, 100), 0.65  # tokens a cascade may begin with, and its share of the dense multiply-adds


def main(weights: Path, train: Path, val: Path, runs: Path = Path("runs/retrofits")) -> None:
    """Make and measure both retrofits."""
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    shares, logs = [], []
    attention_teacher = next(iter(RETROFITS))  # all policies learn from its class attention
    for name, changes in RETROFITS.items():
        base = weights / f"{name}.safetensors"
        where = ["--weights", base, "--data", train, "--leave-out", SET_ASIDE]
        teacher = ["--teacher", attention_teacher, "--teacher-weights", weights / f"{attention_teacher}.safetensors"]
        settings = [*(Setting("isotropic", tokens) for tokens in BUDGETS), Setting("center", BUDGETS[0])]
        before = spot.load(name, weights=base)
        rows.append(card_row(name, measured(before, runs / "accuracy.json", settings, str(val))))
        taught = {}
        for seed in SEEDS:
            run = taught[f"{name}+spot, seed {seed}"] = runs / (f"{name}-seed-{seed}" if seed else name)
            retrofit(name, where, run, "distil-sizes", [*changes, f"seed={seed}"])
        mean = mean_of(list(taught.values()), runs / f"{name}-mean")
        start = policy_of(mean, name, base, where, teacher)
        taught[f"{name}+spot, mean of both seeds"] = mean
        taught[f"{name}+spot, end of distil-again"] = runs / f"{name}-again"
        retrofit(start, where, runs / f"{name}-again", "distil-again", AGAIN.get(name, ()))
        final = mean_of([mean, runs / f"{name}-again"], runs / f"{name}-final")
        delta = policy_of(final, name, base, where, teacher)
        kept = ["--data", train, "--only", SET_ASIDE, "--tokens", *EARLY, "--cost", COST, "--prior", "learned"]
        cascade = delta.with_suffix(CASCADE)
        call("calibrate", delta, "--weights", base, *kept, "--out", cascade)
        for file in (delta, cascade):
            shutil.copy(file, ASSETS / file.name)
        for title, run in {f"{name}+spot": final, **taught}.items():
            each = agreements(before, run, train)
            shares += [{"retrofit": title, **row} for row in each]
            family = Family(delta_of(run, name, base), weights=base)
            found = measured(family, runs / "accuracy.json", settings, str(val))
            (rows if run == final else steps).append(card_row(title, found))
            if run == final:
                top1 = {row["tokens"]: row["top1"] for row in found if row["placement"] == "isotropic"}
                record(ASSETS / "models.json", title, top1, "ImageNet", name)
        for run in (runs / name, runs / f"{name}-seed-1", runs / f"{name}-again"):
            log = report.markdown([minutes(row) for row in epochs_of(run)])
            recipe = read_json(run / "run.json")["settings"]["recipe"]
            logs.append(f"{name}, {recipe['name']}, seed {recipe['seed']}\n\n{log}")
    report.show([*rows, *steps], "Top-1, %")
    tables = {"accuracy": report.markdown(rows), "steps": report.markdown(steps), "shares": report.markdown(shares)}
    files = comment({f"{name}+spot": ASSETS / f"{name}+spot.safetensors" for name in RETROFITS})
    write_text(ASSETS / "RETROFITS.md", CARD.format(**tables, files=files, logs="\n".join(logs)))


def retrofit(model: str | Path, where: Sequence[object], out: Path, recipe: str, changes: Sequence[str]) -> None:
    """Train, unless it is done."""
    if not (out / "model" / "model.safetensors").is_file():
        call("retrofit", model, *where, "--out", out, "--recipe", recipe, *(["--set", *changes] if changes else []))


def delta_of(run: Path, name: str, base: Path) -> Path:
    """A run's delta, whose weights depend on the budget."""
    delta = run / f"{name}+spot.safetensors"
    if not delta.is_file():
        save_retrofit(spot.load(run / "model"), name, base, delta)
    return delta


def save_retrofit(trained: spot.SpotViT, name: str, base: Path, delta: Path) -> None:
    """Write a retrofit as its change of the ViT, with its policy if it has one."""
    config = {"prior": "isotropic", "scale": trained.scale, "min_tokens": MIN_TOKENS}
    save_delta(trained, spot.load(name, weights=base).vit.state_dict(), delta, base=name, config=config)


def policy_of(run: Path, name: str, base: Path, where: Sequence[object], teacher: Sequence[object]) -> Path:
    """A run's delta, with a policy in it."""
    delta = delta_of(run, name, base)
    policy = delta.with_suffix(".policy.safetensors")
    if not policy.is_file():
        call("learn", delta, *where, *teacher, "--precision", "bf16", "--out", policy)
    if delta_policy(delta) is None:
        trained = spot.load(run / "model")
        trained.policy = spot.load_policy(policy, Family(delta, weights=base))
        save_retrofit(trained, name, base, delta)
    return delta


def mean_of(runs: Sequence[Path], out: Path) -> Path:
    """Write the mean of the weights of several runs, which began at one ViT, to out/model."""
    models = [spot.load(run / "model") for run in runs]
    states = [model.vit.state_dict() for model in models]
    mean = {name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]}
    models[0].vit.load_state_dict(mean)
    save_folder(models[0], out / "model")
    return out


def agreements(before: spot.SpotViT, run: Path, train: Path) -> list[dict[str, Any]]:
    """Agreement with the original ViT on its grid, in percent, for shares of the change, on images set aside."""
    file = run / "shares.json"
    if not file.is_file():
        data = images_set_aside(before, train)
        said = evaluate(before, loader(data), [Setting("isotropic", len(before.grid()))], title="before").predictions[0]
        rows, after = [], spot.load(run / "model")
        for share in SHARES:
            settings = [Setting("isotropic", tokens) for tokens in BUDGETS[:-1]]
            model = mixture(before, after, share)
            ours = evaluate(model, loader(data), settings, title=f"{share} of the change").predictions
            agreed = (100 * (ours == said).double().mean(1)).tolist()
            cells = {f"{tokens} tokens": each for tokens, each in zip(BUDGETS[:-1], agreed, strict=True)}
            rows.append({"share of the change": share, **cells})
        write_json(file, rows)
    return read_json(file)


@torch.no_grad()
def mixture(before: spot.SpotViT, after: spot.SpotViT, share: float) -> spot.SpotViT:
    """A model with a share of the change from one model's weights to another's."""
    made = copy.deepcopy(after)
    for ours, theirs in zip(made.vit.parameters(), before.vit.parameters(), strict=True):
        ours.copy_(torch.lerp(theirs, ours, share))
    return made


def card_row(title: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A model's row of the card: top-1 by setting, and half the width of its widest interval."""
    widest = max((row["high"] - row["low"]) / 2 for row in rows)
    cells = {f"{row['placement']} {row['tokens']}": row["top1"] for row in rows}
    return {"model": title, **cells, "±": widest, "images": rows[0]["images"]}


def minutes(row: dict[str, str]) -> dict[str, Any]:
    """An epoch of the log."""
    return {**curve(row), "minutes": float(row["seconds"]) / 60}


CARD = """# Retrofits of timm ViTs

A *retrofit* is a ViT that was fine-tuned to work with few tokens. These two were made by
distillation, without labels (`spot retrofit`, recipes `distil-sizes` and `distil-again`). The files
contain only the *change* of timm's weights, as int8 deltas.
`spot.load("vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot")` downloads timm's weights, or reads
them from a file with `weights=FILE`. It refuses any other base checkpoint.
`python -m tools.make_retrofits WEIGHTS TRAIN VAL` makes the deltas and writes this card.

## Accuracy

The table shows top-1 in percent on ImageNet validation images that were not used for training
(bicubic, crop 0.875). ± is half the width of the widest 95 % interval in the row.

- The first row of each pair is timm's model, adapted but not trained, with windows of scale 1.
- The second row is the retrofit of the package, with window sizes `auto`. Its weights depend on the
  number of tokens N. With 16 tokens and fewer the whole change is applied, and with more tokens
  log(196 / N) / log(196 / 16) of it. On the grid of 196 patches none of it is applied, so the model
  is timm's (`spot/models/family.py`).

{files}

{accuracy}
The deltas were made in four steps:

1. two runs of `distil-sizes` with different seeds,
2. the mean of their changes,
3. `distil-again`, which continues from the mean; each forward pass has the weights for its budget,
4. the point half way between the mean and the end of `distil-again`.

The table shows the accuracy after each step, on the same images and with the same rule for the
weights:

{steps}
This table shows why the weights depend on the budget. A fixed share of the change was applied at
every budget. The numbers are the percentage of images for which the ViT then predicts the same
class as timm's ViT on its grid. The windows are isotropic, of scale `auto`. The images were set
aside from training, and their labels were not used:

{shares}
## Logs

The training images are unlabelled ILSVRC-2012 images: one training and two validation images of
each class, and 2,500 more of 20 classes. None of them is among the images of the accuracy table,
and the 500 images that were set aside are excluded. Each run had one thread, on a machine with
other programs.

{logs}"""


if __name__ == "__main__":
    program("tools.make_retrofits", main, __doc__)
