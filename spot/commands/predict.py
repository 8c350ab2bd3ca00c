"""spot predict: what is in images, and which windows the model saw of them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff

from spot.commands import options
from spot.errors import InputError


def predict(
    images: options.Photos,
    /,
    model: options.Model = options.MODEL,
    weights: options.Weights = None,
    prior: options.Prior = None,
    scale: options.Scale = None,
    tokens: int | None = None,
    until: float | None = None,
    merge: Annotated[bool, FlagCreatePairsOff] = False,
    saliency: options.Saliency = None,
    fit: options.Fit = "crop",
    seed: options.Seed = 0,
    top: int = 5,
    skip_unreadable: options.SkipUnreadable = False,
    out: Path | None = None,
    csv: Path | None = None,
    json: options.Json = None,
    runtime: Literal["torch", "onnx"] = "torch",
) -> None:
    """Name what is in images, and draw the windows the model saw.

    Args:
        tokens: how many windows; by default the model's own.
        until: few windows first, and more until the model is so sure (0.8); it must be calibrated (spot calibrate).
        merge: more windows, similar ones merged on the way, at the cost of as many as asked for.
        top: how many classes to name.
        out: folder for the pictures; by default predictions, or none with --csv or --json.
        csv: write a line per image and class to this file; - is standard output.
        runtime: onnx runs a file of spot export (--model, or first among the images) without torch; no pictures.

    example: spot predict cat.jpg holiday/ --prior focus --tokens 49 --fit whole --csv said.csv
    """
    if runtime == "onnx":
        if until is not None or merge:
            raise InputError("an exported model has one stage; leave out --until and --merge, or use --runtime torch")
        from spot.export.runtime import predict_exported

        predict_exported(
            images, model, top=top, skip=skip_unreadable, csv=csv, json=json, fit=fit, weights=weights, prior=prior,
            tokens=tokens, saliency=saliency, scale=scale, out=out,
        )  # fmt: skip
        return
    import spot
    from spot import report
    from spot.data.files import photo_files
    from spot.evaluation.photos import picture_files, predict, prediction_figure
    from spot.plots import save

    paths = photo_files(images)
    out = Path("predictions") if out is None and csv is None and json is None else out
    report.check_outputs(csv, json)
    loaded = spot.load(model, weights=weights, scale=scale)
    files = dict(zip(paths, picture_files(paths, out), strict=True)) if out else {}
    placed: dict[str, Any] = {"prior": prior, "tokens": tokens, "saliency": saliency, "fit": fit, "seed": seed}
    placed |= {} if until is None else {"until": until}
    placed |= {"merge": True} if merge else {}
    table = []
    for made in predict(loaded, paths, top=top, skip=skip_unreadable, **placed):
        caption = "" if until is None else f"with {len(made.positions)} windows in the last stage"
        report.show(made.rows, str(made.path), digits=1, caption=caption)
        table += [{"image": str(made.path), **row} for row in made.rows]
        if files:
            save(prediction_figure(made, loaded.patch_size), files[made.path])
            report.say(f"The windows are in {files[made.path]}.")
    report.save_csv(csv, table)
    report.save_json(json, table, {"model": loaded.name, **placed})
