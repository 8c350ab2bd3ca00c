"""`spot search`: gradient searches on photographs, with figures, or on a data set, and their reports."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from spot import report
from spot.data.classes import known_classes
from spot.data.folders import photo_files
from spot.data.images import data_for
from spot.data.picture import Fit
from spot.errors import InputError, unknown
from spot.evaluation.accuracy import wilson
from spot.evaluation.photos import names_of, photo_batches, picture_files, short
from spot.models.spot_vit import SpotViT
from spot.options import LoadingOptions
from spot.placement.dataset_search import Searched, search_dataset
from spot.placement.oracle import PRESETS, SearchSettings, search
from spot.placement.saliency import maps_for, rgb
from spot.plots import save
from spot.plots.placements import placement_figure
from spot.processes import this_process


@dataclass(frozen=True)
class PhotoSearch:
    """The search on one photograph, up to the selected step, and its target class."""

    path: Path
    image: Tensor  # (3, H, W) in [0, 1], the model's input
    trajectory: Tensor  # (steps + 1, N, 2), up to the selected step
    name: str  # of the target class: the label, or the dense prediction
    before: float  # its probability at the start
    after: float  # its probability at the end
    predictions: tuple[str, str]  # the predicted classes at the start and at the end
    reached: bool  # whether the final prediction is the target class

    @classmethod
    def of(
        cls, path: Path, image: Tensor, trajectory: Tensor, logits: Tensor, goal: int | None, names: Sequence[str]
    ) -> "PhotoSearch":
        """From logits (2, classes) at the start and the end. Without a goal, the final prediction is the target."""
        start, end = logits.argmax(-1).tolist()
        goal = end if goal is None else goal
        before, after = logits.softmax(-1)[:, goal].tolist()
        predictions = (short(names[start]), short(names[end]))
        return cls(path, image, trajectory, short(names[goal]), before, after, predictions, end == goal)

    def figure(self, window: int, *, adversarial: bool = False) -> Figure:
        """Draw the windows at the start and at the end, and the paths between."""
        start, end = f"start: {self.name} {self.before:.1%}", f"end: {self.name} {self.after:.1%}"
        title = report.printable(self.path.name)
        return placement_figure(
            self.image, self.trajectory, window, start=start, end=end, title=title, adversarial=adversarial
        )


def on_photos(
    model: SpotViT,
    sources: Sequence[str | Path],
    labels: Sequence[str],
    out: Path,
    json: Path | None,
    settings: SearchSettings,
    *,
    title: str,
    **options: Any,
) -> None:
    """Search photographs, write a figure of each to the folder `out`, and show the results in a table with this title.

    options: arguments of `search_photos`.
    """
    paths = photo_files(sources)
    report.check_outputs(json, *([out] if len(paths) == 1 and out.suffix else []))
    files = picture_files(paths, out)
    rows: list[dict[str, Any]] = []
    reached = 0
    for made in search_photos(model, paths, labels, settings, **options):
        picture = files[made.path]
        save(made.figure(model.patch_size, adversarial=settings.objective == "ascent"), picture)
        row = {"image": made.path.name, "class": made.name, "before": made.before, "after": made.after}
        row |= {"prediction": " → ".join(made.predictions), "steps": len(made.trajectory) - 1}
        rows.append(row | {"path": str(made.path), "picture": str(picture)})
        reached += made.reached
    caption = f"{model.tokens} tokens, objective {settings.objective}, learning rate {settings.lr:g}. "
    if settings.objective == "agree":
        caption += f"Of {settings.steps} steps the best one is kept. "
        caption += f"On {reached} of {len(rows)} images the prediction now matches that of the full grid. "
    caption += f"The pictures are in {', '.join(sorted({str(Path(row['picture']).parent) for row in rows}))}."
    headings = {"before": "p(class) before", "after": "p(class) after"}
    shown = [{headings.get(name, name): row[name] for name in row if name not in ("path", "picture")} for row in rows]
    report.show(shown, title, digits=3, caption=caption)
    kept = {name: options.get(name) for name in ("seed", "saliency", "fit")} | {"prior": model.prior}
    about = {"model": model.name, "tokens": model.tokens, "objective": settings.objective, **kept}
    report.save_json(json, rows, {"command": report.command(), **about, **settings.as_json()})


def on_data(
    model: SpotViT,
    data: str,
    out: Path,
    json: Path | None,
    loading: LoadingOptions,
    *,
    saliency: str | None,
    title: str,
    **options: Any,
) -> None:
    """Search a data set, write the placements file `out`, and show the results in a table with this title.

    options: arguments of `spot.placement.dataset_search.search_dataset`.
    """
    report.check_outputs(out, json)
    images = data_for(model, data, **loading.opening())
    maps = maps_for(model, [model.prior], saliency, data)
    options |= loading.readers()
    done = search_dataset(model, images, out, saliency=maps, **options)
    if this_process().is_main_process:
        rows = accuracy_rows(done)
        report.show(rows, title, caption=summary(done, len(images), out))
        about = {**done.placements.metadata, "images": done.images, "seconds": done.seconds}
        report.save_json(json, rows, {"command": report.command(), **about})


def accuracy_rows(done: Searched) -> list[dict[str, Any]]:
    """The accuracy and objective before and after the search."""
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
    """A caption: the numbers of images searched now, searched before, and unreadable."""
    kept = len(done.placements)
    text = f"{kept} images in {out}"
    if done.images:
        text += f"; {done.images} searched now, {done.images / done.seconds:.1f} images/s"
    if kept > done.images:
        text += f"; {kept - done.images} were there before"
    return text + (f"; {count - kept} could not be read." if kept < count else ".")


def search_photos(
    model: SpotViT,
    paths: Sequence[Path],
    labels: Sequence[str] = (),
    settings: SearchSettings = PRESETS["agree"],
    *,
    saliency: str | None = None,
    seed: int = 0,
    batch_size: int = 32,
    fit: Fit = "crop",
    skip: bool = False,
) -> Iterator[PhotoSearch]:
    """Search photographs; `settings` are those of `spot.search`, `labels` those of `class_numbers`.

    The result is the last step, or for "agree" the step that best matches the dense prediction: if the sparse
    prediction already matches it at the start, further steps only make it worse.
    """
    names, objective = names_of(model), settings.objective
    numbers = dict(zip(paths, class_numbers(labels, len(paths), model), strict=True)) if labels else {}
    reading: dict[str, Any] = {"skip": skip, "batch_size": batch_size, "title": "searching"}
    for opened, images, maps in photo_batches(model, paths, None, saliency, fit, **reading):
        keys = [path.name for path in opened]
        classes = torch.tensor([numbers[path] for path in opened], device=images.device) if numbers else None
        start = model.place(images, keys=keys, seed=seed, maps=maps)
        result = search(model, images, classes, start, settings, keys=keys, seed=seed)
        target = result.target if result.target is None or result.target.ndim == 1 else result.target.argmax(1)
        for index, path in enumerate(opened):
            step = int(result.best_step[index]) if objective == "agree" else result.logits.shape[1] - 1
            goal, image = None if target is None else int(target[index]), rgb(images[index], model.data_config).cpu()
            trajectory = result.trajectory[index, : step + 1].cpu()
            yield PhotoSearch.of(path, image, trajectory, result.logits[index, [0, step]], goal, names)


def class_numbers(labels: Sequence[str], count: int, model: SpotViT) -> list[int]:
    """Class indices of labels. A label is an index, a name, a synonym in a name, or a folder name (wnid)."""
    if len(labels) not in (1, count):
        raise InputError(f"one label for all images or one each is needed, got {len(labels)} for {count} images")
    classes, known = known_classes(model), dict[str, int]()
    for index, (_, name) in enumerate(classes):
        for synonym in (name, *name.split(",")):
            known.setdefault(synonym.strip().lower(), index)
    known |= {folder.lower(): index for index, (folder, _) in enumerate(classes)}
    numbers = []
    for label in labels:
        number = int(label) if label.isdecimal() else known.get(label.lower())
        if number is None:
            raise unknown("class", label, known, hint="an index works too")
        if number >= model.num_classes:
            raise InputError(f"labels must be between 0 and {model.num_classes - 1}, the model's classes, got {label}")
        numbers.append(number)
    return numbers * count if len(numbers) == 1 else numbers
