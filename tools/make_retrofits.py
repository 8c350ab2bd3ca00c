"""Retrofit two real ViTs without labels: python -m tools.make_retrofits WEIGHTS TRAIN VAL [RUNS].

WEIGHTS holds timm's files (NAME.safetensors), TRAIN unlabelled photographs, VAL validation images that no training
touches. For each ViT `spot retrofit` is run in RUNS (runs/retrofits by default; what is done is skipped, what was
interrupted goes on), without the images of tools/set_aside.txt. On those, without their labels, is chosen how much of
the change to keep (blend): what agrees best with the ViT before. What remains is written to spot/assets as a delta.
Then the ViT before and the delta as shipped are measured on VAL, once, and the card RETROFITS.md is written anew.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import spot
from spot import report
from spot.data.images import data_for, loader
from spot.errors import InputError
from spot.evaluation.accuracy import Setting, evaluate
from spot.store import read_json, whole, write_json
from tools.make_assets import ASSETS, call, curve, epochs_of, measured

SET_ASIDE = Path(__file__).parent / "set_aside.txt"
# What is changed in the recipe distil-sizes for each: bfloat16 is twice as fast on a CPU that has it.
RETROFITS: dict[str, tuple[str, ...]] = {
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": ("precision=bf16",),
    "deit_tiny_patch16_224.fb_in1k": ("precision=bf16", "epochs=6", "views=3", "ema=0.996"),
}
NAMES = tuple(RETROFITS)
BUDGETS = (25, 49, 100, 196)
BLENDS = (0.7, 0.8, 0.9, 1.0)


def main(
    weights: Path,
    train: Path,
    val: Path,
    runs: Path,
    *,
    assets: Path = ASSETS,
    retrofits: Mapping[str, Sequence[str]] = RETROFITS,
    budgets: Sequence[int] = BUDGETS,
    set_aside: Path = SET_ASIDE,
) -> None:
    """Make and measure what is not there yet."""
    rows, blends, logs = [], [], []
    for name, changes in retrofits.items():
        base, run, delta = weights / f"{name}.safetensors", runs / name, assets / f"{name}+spot.safetensors"
        if not (run / "model" / "model.safetensors").is_file():
            where = ["--data", train, "--leave-out", set_aside, "--out", run]
            call("retrofit", name, "--weights", base, *where, "--recipe", "distil-sizes", "--set", *changes)
        before = spot.load(name, weights=base)
        agreed = agreements(before, run, train, set_aside, budgets)
        blends += [{"model": name, **each} for each in agreed]
        best = max(agreed, key=lambda each: each["mean"])["blend"]
        blended(before, spot.load(run / "model"), best).save_pretrained(run / "blended")
        call("delta", run / "blended", "--weights", base, "--out", delta)
        grid = Setting("isotropic", len(before.grid()))
        few = [Setting(prior, tokens) for prior in ("isotropic", "center") for tokens in budgets[:-1]]
        for title, model in ((name, before), (f"{name}+spot", spot.load(delta, weights=base))):
            rows.append(line(title, measured(model, runs / "accuracy.json", [*few, grid], str(val))))
        logs.append(f"{name} ({', '.join(changes)})\n\n" + report.markdown([minutes(row) for row in epochs_of(run)]))
    report.show(rows, "Top-1, %")
    with whole(assets / "RETROFITS.md") as temporary:
        tables = {"accuracy": report.markdown(rows), "blends": report.markdown(blends)}
        temporary.write_text(CARD.format(**tables, logs="\n".join(logs)))


@torch.no_grad()
def blended(before: spot.SpotViT, after: spot.SpotViT, blend: float) -> spot.SpotViT:
    """The model after training, gone back towards the one before in a straight line through the weights."""
    for ours, theirs in zip(after.parameters(), before.parameters(), strict=True):
        ours.copy_(torch.lerp(theirs, ours, blend))
    return after


def agreements(
    before: spot.SpotViT, run: Path, train: Path, set_aside: Path, budgets: Sequence[int]
) -> list[dict[str, Any]]:
    """How often each blend says what the ViT before says on its grid, in percent by budget, on images set aside."""
    file = run / "blends.json"
    if not file.is_file():
        data = data_for(before, str(train))
        names = set(set_aside.read_text().splitlines())
        data.keep([index for index, key in enumerate(data.keys) if key in names])
        said = evaluate(before, loader(data), [Setting("isotropic", budgets[-1])], title="before").predictions[0]
        rows = []
        for blend in BLENDS:
            model = blended(before, spot.load(run / "model"), blend)
            settings = [Setting("isotropic", tokens) for tokens in budgets]
            ours = evaluate(model, loader(data), settings, title=f"blend {blend}").predictions
            agreed = (100 * (ours == said).double().mean(1)).tolist()
            row = {f"{tokens} tokens": each for tokens, each in zip(budgets, agreed, strict=True)}
            rows.append({"blend": blend, **row, "mean": sum(agreed) / len(agreed)})
        write_json(file, rows)
    return read_json(file)


def line(title: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A model's row of the card: top-1 by setting, and what half an interval is at most."""
    widest = max((row["high"] - row["low"]) / 2 for row in rows)
    cells = {f"{row['placement']} {row['tokens']}": row["top1"] for row in rows}
    return {"model": title, **cells, "±": widest, "images": rows[0]["images"]}


def minutes(row: dict[str, str]) -> dict[str, Any]:
    """An epoch of the log."""
    return {**curve(row), "minutes": float(row["seconds"]) / 60}


CARD = """# Real ViTs, retrofitted without labels

What distillation (`spot retrofit`, recipe `distil-sizes`) changed in two timm ViTs, as int8 deltas. The base's weights
are not here: `spot.load("vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot")` takes them from timm, or from a file with
`weights=FILE`, and refuses any other base. This card and the deltas are written by
`python -m tools.make_retrofits WEIGHTS TRAIN VAL`; nothing in it is typed by hand.

Top-1 in percent on ImageNet validation images that training never saw (bicubic, crop 0.875); ± is the widest half of a
95 % interval. The first row of each two is timm's model, adapted and untrained, with windows of scale 1; the second is
the delta as shipped, with the scale that `auto` means.

{accuracy}
How much of the change is kept (the blend with the best mean), chosen without labels on images that were set aside from
training: how often the blended model says what the ViT says on its grid, in percent.

{blends}
## Logs

Trained on unlabelled ILSVRC-2012 images: one training and two validation images of each class (none of them among those
of the table above), and 2,500 more of 20 classes, less the 500 set aside. One thread each, beside other work.

{logs}"""


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5) or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__)
    try:
        folders = [Path(word) for word in (*sys.argv[1:], "runs/retrofits")]
        main(folders[0], folders[1], folders[2], folders[3])
    except (InputError, OSError) as error:
        raise SystemExit(f"retrofits: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("retrofits: stopped; what was finished is kept, and the same command goes on") from None
