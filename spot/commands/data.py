"""`spot data`: look at the built-in data set."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro

from spot.commands import options
from spot.data.difficulty import Difficulty


def data(
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")],
    /,
    *,
    show: bool = False,
    masks: bool = False,
    out: Path = Path("scenes.png"),
    examples: int = 3,
    split: str = "train",
    seed: int = 0,
    json: options.Json = None,
    difficulty: Annotated[Difficulty, tyro.conf.arg(name="")] = Difficulty(),  # noqa: B008 (frozen)
) -> None:
    """Describe the built-in data set, and show examples of its 32 classes.

    Scenes are drawn on demand, the same on every machine. Each factor below is an option here and
    a field of spot.data.difficulty.Difficulty.

    Args:
        name: scenes; needle, a small object in a picture of 192 pixels; or needle:256, of as many pixels as it says.
        show: save a contact sheet, every outline (rows) with every texture (columns).
        masks: darken everything but the object on that sheet, by its exact mask.
        out: where the contact sheet goes.
        examples: how many scenes of each class are on it.
        split: train, validation or test.
        seed: another seed is another data set of the same kind.
        difficulty: the factors.

    example: spot data scenes --show --distractors 0 8
    """
    from time import process_time

    from spot import report
    from spot.data.difficulty import difficulty_of
    from spot.data.scenes import CLASSES, SPLITS, Scenes
    from spot.data.shapes import OUTLINES, TEXTURES
    from spot.errors import InputError, unknown

    drawn = difficulty_of(name)
    if drawn is None:
        raise unknown("built-in data set", name, ("scenes", "needle"))
    if drawn != Difficulty():
        if difficulty != Difficulty():
            raise InputError(f"factors are options of scenes; those of {name} are fixed, but for its size: needle:256")
        difficulty = drawn

    if examples < 1:
        raise InputError(f"a contact sheet needs at least one example of each class, got {examples}")
    report.check_outputs(json, *([out] if show else []))
    length = max(len(CLASSES) * examples, 256)
    scenes = Scenes(split, length, difficulty=difficulty, seed=seed)
    start = process_time()
    batch = scenes.draw(range(length))
    rate = round(length / (process_time() - start))
    side = difficulty.image_size
    rows = [
        {"what": "image", "value": f"{side} × {side} RGB"},
        {"what": "classes", "value": f"{len(CLASSES)} = {len(OUTLINES)} outlines × {len(TEXTURES)} textures"},
        {"what": "outlines", "value": ", ".join(OUTLINES)},
        {"what": "textures", "value": ", ".join(TEXTURES)},
        {"what": "splits", "value": ", ".join(f"{name} {length:,}" for name, length in SPLITS.items())},
        {"what": "covered by the object", "value": f"{batch.masks.mean().item():.1%} of the image"},
        {"what": "drawn by one core", "value": f"{rate:,} images/s"},
    ]
    report.show(rows, name.capitalize())
    report.save_json(json, rows, {"split": split, "seed": seed, "difficulty": asdict(difficulty)})
    if show:
        from spot.plots import save
        from spot.plots.contact_sheet import contact_sheet

        images = batch.images * (0.15 + 0.85 * batch.masks[:, None]) if masks else batch.images
        sheet = images[: len(CLASSES) * examples].unflatten(0, (examples, len(OUTLINES), len(TEXTURES)))
        save(contact_sheet(sheet.permute(1, 2, 0, 3, 4, 5), list(OUTLINES), list(TEXTURES)), out)
        report.say(f"The contact sheet is in {out}.")
