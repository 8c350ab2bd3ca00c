"""Figures, one file per kind: each function takes tables and tensors, never models, and returns a Figure to `save`."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spot.errors import InputError
from spot.store import whole


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure, whole or not at all; the suffix says the format."""
    check_ending(path)
    with whole(path) as temporary:
        figure.savefig(temporary)


def check_ending(path: str | Path | None) -> None:
    """Refuse a kind of picture that cannot be drawn; callers with much to do ask before they begin."""
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path is not None and Path(path).suffix[1:].lower() not in kinds:
        raise InputError(f"a picture can be {', '.join(kinds)}, got {path}")
