"""Searches as `spot search` makes and reports them: on photographs, with pictures, or on a data set."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spot import report
from spot.data.files import photo_files
from spot.data.images import Stream, data_for
from spot.errors import InputError
from spot.evaluation.accuracy import wilson
from spot.evaluation.options import Loading
from spot.evaluation.photos import picture_files, search_figure, search_photos
from spot.models.spot_vit import SpotViT
from spot.placement.dataset_search import Searched, search_dataset
from spot.placement.oracle import PRESETS, SearchSettings
from spot.placement.saliency import maps_for
from spot.plots import save
from spot.processes import this_process


def on_photos(
    model: SpotViT,
    sources: Sequence[str | Path],
    labels: Sequence[str],
    out: Path,
    json: Path | None = None,
    settings: SearchSettings = PRESETS["agree"],
    **options: Any,
) -> list[dict[str, Any]]:
    """Search photographs, draw each into the folder `out`, show and return what changed.

    options: of `spot.evaluation.photos.search_photos`.
    """
    paths = photo_files(sources)
    report.check_outputs(json, *([out] if len(paths) == 1 and out.suffix else []))
    files = dict(zip(paths, picture_files(paths, out), strict=True))
    rows: list[dict[str, Any]] = []
    reached = 0
    for made in search_photos(model, paths, labels, settings, **options):
        save(search_figure(made, model.patch_size, adversarial=settings.objective == "ascent"), files[made.path])
        row: dict[str, Any] = {"image": made.path.name, "class": made.name, "before": made.before, "after": made.after}
        row |= {"prediction": " → ".join(made.predictions), "steps": len(made.trajectory) - 1}
        rows.append(row | {"path": str(made.path), "picture": str(files[made.path])})
        reached += made.reached
    caption = f"{model.tokens} tokens, {settings.steps} steps at {settings.lr:g}, objective {settings.objective}. "
    if settings.objective == "agree":
        caption += f"With {reached} of {len(rows)} the few tokens now say what all tokens say. "
    caption += f"Pictures: {', '.join(sorted({str(Path(row['picture']).parent) for row in rows}))}"
    shown = [{name: row[name] for name in row if name not in ("path", "picture")} for row in rows]
    report.show(shown, model.name, digits=3, caption=caption)
    kept = {name: options.get(name) for name in ("seed", "prior", "saliency", "fit")}
    about = {"model": model.name, "tokens": model.tokens, "objective": settings.objective, **kept}
    report.save_json(json, rows, {"command": report.command(), **about, **settings.as_json()})
    return rows


def on_data(
    model: SpotViT,
    data: str,
    out: Path,
    json: Path | None = None,
    loading: Loading = Loading(batch_size=32),  # noqa: B008 (frozen)
    *,
    prior: str | None = None,
    saliency: str | None = None,
    **options: Any,
) -> Searched:
    """Search a data set into the placements file `out`, and show what changed.

    options: of `spot.placement.dataset_search.search_dataset`.
    """
    report.check_outputs(out, json)
    images = data_for(model, data, **loading.opening())
    if isinstance(images, Stream):
        raise InputError(f"{data} is a stream, whose images have no names to keep placements under")
    maps, state = maps_for(model, [prior or model.prior], saliency, data), this_process()
    options |= loading.readers()
    done = search_dataset(model, images, out, prior=prior, saliency=maps, state=state, **options)
    if state.is_main_process:
        rows = accuracy_rows(done)
        report.show(rows, model.name, caption=summary(done, len(images), out))
        about = {**done.placements.metadata, "images": done.images, "seconds": done.seconds}
        report.save_json(json, rows, {"command": report.command(), **about})
    return done


def accuracy_rows(done: Searched) -> list[dict[str, Any]]:
    """Accuracy and objective before and after the search."""
    values = done.placements.values
    labelled = values["labels"] >= 0
    rows = []
    for when, step in (("start", 0), ("end", -1)):
        row: dict[str, Any] = {"placement": when, "objective": values["losses"][:, step].mean().item()}
        if labelled.any():
            right = (values["predictions"][:, step] == values["labels"])[labelled].double().mean().item()
            low, high = wilson(right, int(labelled.sum()))
            row["top-1 %"], row["95 % interval"] = 100 * right, f"{100 * low:.1f} to {100 * high:.1f}"
            row["p(label) %"] = 100 * values["probabilities"][labelled, step].mean().item()
        rows.append(row)
    return rows


def summary(done: Searched, count: int, out: Path) -> str:
    """What was done now, what was there, what is missing."""
    kept = len(done.placements)
    text = f"{kept} images in {out}"
    if done.images:
        text += f"; {done.images} searched now, {done.images / done.seconds:.1f} images/s"
    if kept > done.images:
        text += f"; {kept - done.images} were there before"
    return text + (f"; {count - kept} could not be read." if kept < count else ".")
