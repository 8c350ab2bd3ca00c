"""Retrofit two real ViTs without labels: python -m tools.make_retrofits WEIGHTS TRAIN VAL [RUNS].

WEIGHTS holds timm's files (NAME.safetensors), TRAIN unlabelled photographs, VAL validation images that
no training touches. For each ViT `spot retrofit` is run in RUNS (runs/retrofits by default; what is done
is skipped, what was interrupted goes on) and what it changed is written to spot/assets as a delta. Then the ViT
before, the retrofit, and the delta as shipped are measured on VAL, and the card RETROFITS.md is written anew.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import spot
from spot import report
from spot.errors import InputError
from spot.evaluation.accuracy import Setting
from spot.store import whole
from tools.make_assets import ASSETS, call, curve, epochs_of, measured

NAMES = ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", "deit_tiny_patch16_224.fb_in1k")
SETTINGS = [Setting("isotropic", tokens) for tokens in (25, 49, 100, 196)] + [Setting("center", 25)]


def main(
    weights: Path,
    train: Path,
    val: Path,
    runs: Path,
    *,
    assets: Path = ASSETS,
    names: Sequence[str] = NAMES,
    settings: Sequence[Setting] = SETTINGS,
    options: Sequence[str] = (),
) -> None:
    """Make and measure what is not there yet; the options go to `spot retrofit`."""
    rows, logs = [], []
    for name in names:
        base, run, delta = weights / f"{name}.safetensors", runs / name, assets / f"{name}+spot.safetensors"
        if not (run / "model" / "model.safetensors").is_file():
            call("retrofit", name, "--weights", base, "--data", train, "--out", run, *options)
        call("delta", run / "model", "--weights", base, "--out", delta)
        models = {
            name: spot.load(name, weights=base),
            f"{name}, retrofitted": spot.load(run / "model"),
            f"{name}+spot": spot.load(delta, weights=base),
        }
        for title, model in models.items():
            rows.append(line(title, measured(model, runs / "accuracy.json", settings, str(val))))
        logs.append(f"{name}\n\n" + report.markdown([minutes(row) for row in epochs_of(run)]))
    report.show(rows, "Top-1, %")
    with whole(assets / "RETROFITS.md") as temporary:
        temporary.write_text(CARD.format(accuracy=report.markdown(rows), logs="\n".join(logs)))


def line(title: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A model's row of the card: top-1 by setting, and what half an interval is at most."""
    widest = max((row["high"] - row["low"]) / 2 for row in rows)
    cells = {f"{row['placement']} {row['tokens']}": row["top1"] for row in rows}
    return {"model": title, **cells, "±": widest, "images": rows[0]["images"]}


def minutes(row: dict[str, str]) -> dict[str, Any]:
    """An epoch of the log."""
    return {**curve(row), "minutes": float(row["seconds"]) / 60}


CARD = """# Real ViTs, retrofitted without labels

What distillation (`spot retrofit`, recipe `distil`) changed in two timm ViTs, as int8 deltas. The base's weights are
not here: `spot.load("vit_tiny_patch16_224.augreg_in21k_ft_in1k+spot")` takes them from timm, or from a file with
`weights=FILE`, and refuses any other base. This card and the deltas are written by
`python -m tools.make_retrofits WEIGHTS TRAIN VAL`; nothing in it is typed by hand.

Top-1 in percent on ImageNet validation images that training never saw (bicubic, crop 0.875); ± is the widest half of a
95 % interval. The first row of each three is timm's model, adapted and untrained; the third is the delta as shipped.

{accuracy}
## Logs

Trained on unlabelled ImageNet training images, one thread each, two runs beside each other and other work.

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
