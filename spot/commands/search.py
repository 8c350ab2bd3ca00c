"""spot search: the oracle on photographs, with pictures, or on a data set, into a placements file."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

if TYPE_CHECKING:
    from torch import Tensor

    from spot.placement.dataset_search import Searched

DEFAULT_MODEL = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


def search(
    images: tyro.conf.Positional[tuple[Path, ...]] = (),
    /,
    *,
    data: str | None = None,
    out: Path | None = None,
    model: str = DEFAULT_MODEL,
    weights: Path | None = None,
    label: tuple[str, ...] = (),
    objective: Literal["descent", "ascent", "obfuscate", "entropy", "agree"] | None = None,
    tokens: int = 25,
    prior: str | None = None,
    saliency: str | None = None,
    seed: int = 0,
    preset: Literal["paper", "paper-long", "authors"] = "paper",
    steps: int | None = None,
    lr: float | None = None,
    optimizer: Literal["adam", "adamw", "sgd"] | None = None,
    project: bool | None = None,
    grid: bool = False,
    snap: Literal["end", "every-step"] = "end",
    keep: Literal["trajectories", "positions"] = "trajectories",
    split: str = "val",
    data_root: Path | None = None,
    limit: int | None = None,
    unreadable: Literal["stop", "skip"] = "stop",
    batch_size: int = 32,
    workers: int | None = None,
    mixed_precision: bool = False,
    json: Path | None = None,
) -> None:
    """Move tokens to where a model sees an image better, or worse, by gradient through the frozen model.

    With images, a picture of each shows the windows at the start and at the end and the way between,
    from dark purple to bright yellow (red for ascent). With --data, all images are searched into one
    placements file; started again after a kill it goes on where it stopped. Any model can be
    evaluated with that file: spot evaluate MODEL --data DIR --placements FILE. Under `accelerate launch`
    or torchrun the images are shared out.

    Args:
        images: photographs.
        data: a folder with one sub-folder per class, ImageNet's root, a timm data set, or "scenes".
        out: the folder of the pictures (search), or with --data the .safetensors file.
        model: a built-in model, a folder or file that spot saved, a hub id, or a timm name.
        weights: a file with the timm model's weights, instead of downloading them.
        label: each image's class, by number or name, or one for all of them.
        objective: by default descent on the label, and without labels agree. ascent makes the label
            less probable, obfuscate makes a random wrong one more so; entropy and agree (with what
            the model says of the whole image) need no label.
        tokens: how many.
        prior: where tokens start; by default as the model says.
        saliency: for salient, focus and background: spectral (the default), clipseg, an .onnx file or a folder of maps.
        seed: of random priors and wrong labels, together with each image's name.
        preset: the paper's 5 steps at rate 0.003 or 10 at 0.01, or what the authors' code does.
        steps: instead of the preset's.
        lr: instead of the preset's, in fractions of the image.
        optimizer: instead of the preset's.
        project: keep tokens in the image, instead of as the preset says.
        grid: the result must lie on the model's own patch grid.
        snap: with --grid, at the end only or at every step.
        keep: with --data, whole trajectories or only the final positions.
        split: val, train or test, where the data has several.
        data_root: where a timm data set keeps its files.
        limit: at most so many images, evenly spread over the classes.
        unreadable: stop at an image that cannot be read, or skip it and count it.
        batch_size: images at a time.
        workers: processes that read images; by default one less than there are cores, at most 8.
        mixed_precision: bfloat16 inside the model, on accelerators.
        json: write the table, and what made it, to this file.

    example: spot search dog.jpg --label "golden retriever" --tokens 49
    """
    import spot
    from spot.errors import InputError
    from spot.placement.oracle import PRESETS
    from spot.processes import this_process

    if bool(images) == (data is not None):
        raise InputError("give either images or --data, one of them")
    if data is not None and label:
        raise InputError("--label goes with images; a data set brings its own labels")
    state = this_process()
    loaded = spot.load(model, weights=weights, tokens=tokens).to(state.device)
    start = starting_prior(loaded, prior, saliency, data)
    settings: dict[str, Any] = dict(PRESETS[preset])
    chosen = {"steps": steps, "lr": lr, "optimizer": optimizer, "project": project}
    settings |= {name: value for name, value in chosen.items() if value is not None}
    settings |= {"grid": loaded.grid_size if grid else None, "snap": snap, "mixed_precision": mixed_precision}
    if data is None:
        goal = objective or ("descent" if label else "agree")
        rows = search_images(
            loaded, images, label, out or Path("search"), seed=seed, start=start,
            batch_size=batch_size, objective=goal, **settings,
        )  # fmt: skip
        about: dict[str, Any] = {"model": loaded.name, "objective": goal, "seed": seed, **settings}
        caption = f"{tokens} tokens, {settings['steps']} steps at {settings['lr']:g}, objective {goal}. "
        caption += f"Pictures: {', '.join(sorted({str(Path(row['picture']).parent) for row in rows}))}"
    else:
        from spot.data.images import Stream, available_workers, data_for
        from spot.placement.dataset_search import search_dataset

        file = out or Path("placements.safetensors")
        found = data_for(loaded, data, split=split, unreadable=unreadable, limit=limit, root=data_root)
        if isinstance(found, Stream):
            raise InputError(f"{data} is a stream, whose images have no names to keep placements under")
        done = search_dataset(
            loaded, found, file, seed=seed, batch_size=batch_size,
            workers=available_workers() if workers is None else workers, keep=keep, state=state,
            objective=objective or "descent", **start, **settings,
        )  # fmt: skip
        rows = accuracy_rows(done)
        about = {**done.placements.metadata, "images": done.images, "seconds": done.seconds}
        caption = summary(done, len(found), file)
    if not state.is_main_process:
        return
    from spot import report

    hidden = ("path", "picture")
    shown = [{name: value for name, value in row.items() if name not in hidden} for row in rows]
    report.show(shown, loaded.name, digits=3 if data is None else 2, caption=caption)
    if json is not None:
        report.save_json(json, rows, {"command": shlex.join(["spot", *sys.argv[1:]]), **about})


def starting_prior(model: Any, prior: str | None, saliency: str | None, data: str | None) -> dict[str, Any]:
    """Set the model's prior, or say which prior draws from which saliency."""
    from spot.errors import InputError
    from spot.placement.priors import SALIENT_PRIORS

    if prior not in SALIENT_PRIORS:
        if saliency is not None:
            raise InputError(f"--saliency goes with --prior {' or '.join(SALIENT_PRIORS)}")
        if prior is not None:
            model.prior = prior
        return {}
    from spot.data.picture import evaluation_transform
    from spot.placement.saliency import resolve_saliency

    transform = evaluation_transform(model.data_config)
    return {"prior": prior, "saliency": resolve_saliency(saliency or "spectral", model.data_config, transform, data)}


def search_images(
    model: Any,
    paths: Sequence[Path],
    labels: Sequence[str],
    out: Path,
    *,
    seed: int,
    start: dict[str, Any],
    batch_size: int,
    objective: str,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Search photographs, draw each, and say what changed."""
    import torch

    from spot import report
    from spot.data.images import class_names
    from spot.data.picture import evaluation_transform, open_image
    from spot.placement.dataset_search import obfuscated, place
    from spot.placement.oracle import search as run_search
    from spot.placement.saliency import rgb
    from spot.plots import save
    from spot.plots.placements import placement_figure

    transform = evaluation_transform(model.data_config)
    device = next(model.parameters()).device
    names = class_names(model)
    numbers = class_numbers(labels, len(paths), model, names) if labels else None
    goal = "descent" if objective == "obfuscate" else objective
    rows: list[dict[str, Any]] = []
    files = picture_files(paths, out)
    for begin in report.track(range(0, len(paths), batch_size), "searching"):
        some = slice(begin, begin + batch_size)
        keys = [path.name for path in paths[some]]
        images = torch.stack([transform(open_image(path)) for path in paths[some]]).to(device)
        classes = None if numbers is None else torch.tensor(numbers[some], device=device)
        if objective == "obfuscate" and classes is not None:
            classes = obfuscated(classes, keys, model.num_classes, seed)
        positions = place(model, images, keys, seed=seed, **start)
        result = run_search(model, images, classes, positions, objective=goal, **settings)
        for index, picture in enumerate(rgb(images, model.data_config)):
            path, file, logits = paths[begin + index], files[begin + index], result.logits[index]
            shown = shown_class(result.target, logits, index, objective)
            before, after = (logits[step].softmax(-1)[shown].item() for step in (0, -1))
            name = short(names[shown]) if names else f"class {shown}"
            figure = placement_figure(
                picture,
                result.trajectory[index],
                model.patch_size,
                start=f"start: {name} {before:.1%}",
                end=f"end: {name} {after:.1%}",
                title=path.name,
                adversarial=objective == "ascent",
            )
            save(figure, file)
            guesses = logits[[0, -1]].argmax(-1).tolist()
            rows.append(
                {
                    "image": path.name,
                    "class": name,
                    "before": before,
                    "after": after,
                    "prediction": " → ".join(short(names[guess]) if names else str(guess) for guess in guesses),
                    "path": str(path),
                    "picture": str(file),
                }
            )
    return rows


def shown_class(target: "Tensor | None", logits: "Tensor", index: int, objective: str) -> int:
    """The class whose probability tells the search's story: its target, or what the model says at the end."""
    if target is None:
        return int(logits[-1].argmax())
    return int(target[index].argmax()) if objective == "agree" else int(target[index])


def class_numbers(labels: Sequence[str], count: int, model: Any, names: Sequence[str] | None) -> list[int]:
    """Class indices of labels given by number, name, one of a name's synonyms, or folder name (wnid)."""
    from spot.data.images import class_folders
    from spot.errors import InputError, unknown

    if len(labels) not in (1, count):
        raise InputError(f"give one --label for all images or one each, got {len(labels)} for {count} images")
    known: dict[str, int] = {}
    for index, name in enumerate(names or []):
        for synonym in (name, *name.split(",")):
            known.setdefault(synonym.strip().lower(), index)
    folders = class_folders(model)
    known |= {} if isinstance(folders, int) else {name.lower(): index for index, name in enumerate(folders)}
    found = []
    for label in labels:
        if label.isdecimal() and int(label) < model.num_classes:
            found.append(int(label))
        elif label.isdecimal():
            raise InputError(f"labels must be between 0 and {model.num_classes - 1}, the model's classes, got {label}")
        elif label.lower() in known:
            found.append(known[label.lower()])
        else:
            raise unknown("class", label, known, hint="a class index will do too")
    return found * count if len(found) == 1 else found


def picture_files(paths: Sequence[Path], out: Path) -> list[Path]:
    """Where each image's picture goes; images of one name do not overwrite each other."""
    if len(paths) == 1 and out.suffix:
        return [out]
    files: list[Path] = []
    for path in paths:
        file, again = out / f"{path.stem}.png", 2
        while file in files:
            file, again = out / f"{path.stem}-{again}.png", again + 1
        files.append(file)
    return files


def short(name: str) -> str:
    """The first of a class's synonyms."""
    return name.split(",")[0]


def accuracy_rows(done: "Searched") -> list[dict[str, Any]]:
    """Accuracy and objective before and after the search."""
    from spot.evaluation.accuracy import wilson

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


def summary(done: "Searched", count: int, out: Path) -> str:
    """What was done now, what was there, what is missing."""
    kept = len(done.placements)
    text = f"{kept} images in {out}"
    if done.images:
        text += f"; {done.images} searched now, {done.images / done.seconds:.1f} images/s"
    if kept > done.images:
        text += f"; {kept - done.images} were there before"
    return text + (f"; {count - kept} could not be read." if kept < count else ".")
