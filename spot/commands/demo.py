"""spot demo: the whole method in about a minute, on the built-in model, or on a photo of your own."""

from pathlib import Path

from spot import options


def demo(
    *,
    image: Path | None = None,
    model: str | None = None,
    weights: options.Weights = None,
    tokens: tuple[int, ...] = (),
    scenes: int = 320,
    gallery: int = 10,
    out: Path = Path("demo"),
    seed: options.Seed = 0,
) -> None:
    """Show the method: a table of accuracies, searched placements, and accuracy against cost.

    Without arguments it uses the built-in scenes and model, and downloads nothing.
    With --image it uses a photograph and a retrofitted ViT.

    Args:
        image: a photograph, instead of the built-in scenes.
        model: the model. Default: scenes-a, or vit-ti for a photograph.
        tokens: budgets. Default: 9 16 36 64 on scenes, 25 49 100 196 on a photograph.
        scenes: number of scenes to classify.
        gallery: number of searched placements to draw.
        out: folder for the pictures.

    example: spot demo --image photo.jpg --model deit-ti
    """
    import spot
    from spot import report
    from spot.data.picture import open_image
    from spot.demo import on_photo, on_scenes
    from spot.errors import InputError
    from spot.models.loading import load_source

    if scenes < 32 or gallery < 1:
        raise InputError("the demo needs at least 32 scenes, so that every class is there, and one for the gallery")
    if len(set(tokens)) < len(tokens):
        raise InputError(f"each budget is shown once, got {' '.join(map(str, tokens))}")
    report.check_outputs(folder=out)
    photo = None if image is None else open_image(image)
    name = model or ("scenes-a" if image is None else options.MODEL)
    if image is None or photo is None:
        loaded = spot.load(name, weights=weights)
        on_scenes(name, loaded, tokens or (9, 16, 36, 64), scenes, gallery, out, seed)
    else:
        on_photo(name, load_source(name, weights=weights), photo, image.name, tokens or (25, 49, 100, 196), out, seed)
