"""spot demo: the method in about a minute, on the built-in model."""

from pathlib import Path

from spot import report
from spot.errors import InputError


def demo(
    *, model: str = "scenes-a", tokens: tuple[int, ...] = (9, 16, 36, 64), scenes: int = 320, out: Path = Path("demo")
) -> None:
    """Show the method: a table of accuracies, searched placements, and accuracy against cost.

    It uses built-in data and a built-in model, and downloads nothing.

    example: spot demo

    Args:
        model: a model of the built-in scenes
        tokens: numbers of tokens
        scenes: number of scenes to classify
        out: folder for the pictures
    """
    from spot.demo import run_demo

    if scenes < 32:
        raise InputError(f"the demo needs at least 32 scenes, so that every class is there, got {scenes}")
    if not tokens:
        raise InputError("tokens must be one or more numbers, got none")
    report.check_outputs(folder=out)
    run_demo(model, tuple(dict.fromkeys(tokens)), scenes, out)
