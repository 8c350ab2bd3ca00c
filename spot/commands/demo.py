"""spot demo: the method in about a minute, on the built-in model."""

from pathlib import Path

from spot import options


def demo(
    *,
    model: str = "scenes-a",
    tokens: tuple[int, ...] = (9, 16, 36, 64),
    scenes: int = 320,
    gallery: int = 10,
    out: Path = Path("demo"),
    seed: options.Seed = 0,
) -> None:
    """Show the method: a table of accuracies, searched placements, and accuracy against cost.

    It uses built-in data and a built-in model, and downloads nothing.

    example: spot demo

    Args:
        model: a model of the built-in scenes
        tokens: budgets
        scenes: number of scenes to classify
        gallery: number of searched placements to draw
        out: folder for the pictures
    """
    import spot
    from spot import report
    from spot.demo import on_scenes
    from spot.errors import InputError

    if scenes < 32 or gallery < 1:
        raise InputError("the demo needs at least 32 scenes, so that every class is there, and one for the gallery")
    if not tokens or len(set(tokens)) < len(tokens):
        raise InputError(f"tokens must be different numbers, got {' '.join(map(str, tokens)) or 'none'}")
    report.check_outputs(folder=out)
    on_scenes(model, spot.load(model), tokens, scenes, gallery, out, seed)
