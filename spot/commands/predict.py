"""spot predict: classify images, and draw the windows the model used."""

from pathlib import Path
from typing import Any, Literal

from spot import options, report
from spot.errors import InputError


def predict(
    images: options.Photos,
    /,
    model: options.Model = options.MODEL,
    weights: options.Weights = None,
    prior: options.Prior = None,
    scale: options.Scale = None,
    tokens: options.Maybe[int] = None,
    cascade: options.Maybe[Path] = None,
    until: options.Maybe[float] = None,
    merge: bool = False,
    saliency: options.Saliency = None,
    glimpses: options.Maybe[int] = None,
    fit: options.Fit = None,
    seed: options.Seed = 0,
    top: int = 5,
    skip_unreadable: options.SkipUnreadable = False,
    out: options.Maybe[Path] = None,
    csv: options.Maybe[Path] = None,
    json: options.Json = None,
    runtime: Literal["torch", "onnx"] = "torch",
) -> None:
    """Classify images, and draw the windows the model used.

    example: spot predict cat.jpg holiday/ --prior focus --tokens 49 --fit whole --csv classes.csv

    Args:
        tokens: number of tokens. Default: the model's own, 49 for a shipped retrofit
        cascade: early exit with this file of spot calibrate. Default with --until: the shipped cascade
        until: early exit: start with few tokens and add more until the confidence reaches this value, for example 0.8
        merge: place more windows and merge similar ones in later blocks, at the cost of --tokens
        glimpses: number of places to classify, for a model of spot learn --look glimpses. Default: its own
        top: number of classes to print
        out: folder for the pictures. Default: predictions, or none with --csv or --json
        csv: write one line per image and class to this file; - is standard output
        runtime: onnx runs a file of spot export without torch. Give the file as --model, or before the images
    """
    placement: dict[str, Any] = {
        "prior": prior, "tokens": tokens, "scale": scale, "saliency": saliency, "until": until, "merge": merge,
        "glimpses": glimpses, "fit": fit,
    }  # fmt: skip
    if runtime == "onnx":
        for name, value in {"weights": weights, "cascade": cascade, "out": out, **placement}.items():
            if value is not None and value is not False:
                raise InputError(f"--{name} goes with --runtime torch; an exported file has its own settings")
        predict_exported(images, model, top, skip_unreadable, csv, json)
        return
    options.check_prior(prior)
    from spot.data.folders import photo_files
    from spot.evaluation.photos import picture_files, predict
    from spot.models.cascade import Cascade
    from spot.models.loading import load_source, read_prior
    from spot.plots import save

    paths = photo_files(images)
    out = Path("predictions") if out is None and csv is None and json is None else out
    report.check_outputs(csv, json)
    source = load_source(model, weights=weights)
    early_exit = Cascade.load(cascade or model, source) if until is not None or cascade is not None else None
    files = picture_files(paths, out) if out else {}
    table = []
    chosen: Any = {**placement, "prior": read_prior(prior, source), "cascade": early_exit}
    for made in predict(source, paths, seed=seed, top=top, skip=skip_unreadable, **chosen):
        caption = "" if early_exit is None else f"with {len(made.positions)} windows in the last stage"
        shown = [{**row, "probability": f"{row['probability']:.1f} %"} for row in made.rows]
        report.show(shown, str(made.path), caption=caption)
        table += [{"image": str(made.path), **row} for row in made.rows]
        if files:
            save(made.figure(source.patch_size), files[made.path])
            report.say(f"The windows are in {files[made.path]}.")
    report.save_csv(csv, table)
    report.save_json(json, table, {"model": source.name, **placement, "seed": seed})


def predict_exported(
    images: tuple[str, ...], model: str, top: int, skip: bool, csv: Path | None, json: Path | None
) -> None:
    """Predict with a file of spot export; imports no torch."""
    from spot.data.folders import photo_files
    from spot.export.runtime import STAGES, Exported, ExportedCascade, predict_photos

    report.check_outputs(csv, json)
    if images and (images[0].endswith(".onnx") or (Path(images[0]) / STAGES).is_file()):
        model, images = images[0], images[1:]
    exported, table = ExportedCascade(model) if Path(model).is_dir() else Exported(model), []
    for path, rows in predict_photos(exported, photo_files(images), top=top, skip=skip):
        report.show([{**row, "probability": f"{row['probability']:.1f} %"} for row in rows], str(path))
        table += [{"image": str(path), **row} for row in rows]
    report.save_csv(csv, table)
    report.save_json(json, table, {"model": model, "runtime": "onnx", "model_hash": exported.about["model_hash"]})
