"""Figures, one module per kind. Functions take tables and tensors, never models, and return a Figure for `save`."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spot.errors import InputError
from spot.store import atomic_write


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure atomically, in the format of the suffix."""
    check_ending(path)
    with atomic_write(path) as temporary:
        figure.savefig(temporary)


def check_ending(path: str | Path | None) -> None:
    """Raise InputError for an unsupported picture format, before any long computation."""
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path is not None and Path(path).suffix[1:].lower() not in kinds:
        raise InputError(f"a picture can be {', '.join(kinds)}, got {path}")
