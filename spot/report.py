"""Results for people and for programs: one table, shown in the terminal, as Markdown or as JSON.

A table is a list of rows (dicts with the same keys). Progress bars live here too, because
they share the console. Everything for people goes to stderr or the console, never into data.
"""

import math
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from spot.store import write_json

T = TypeVar("T")
Row = Mapping[str, Any]

console = Console()
errors = Console(stderr=True)


def text(value: Any, digits: int = 2) -> str:
    """A cell as a person reads it: floats rounded, None and NaN as a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return str(value)


def warn(sentence: str) -> None:
    """Something a person should know, on stderr."""
    errors.print(f"spot: {sentence}", soft_wrap=True, markup=False, highlight=False)


def columns(rows: Sequence[Row]) -> list[str]:
    """The keys of all rows, in order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def show(rows: Sequence[Row], title: str = "", *, digits: int = 2, caption: str = "") -> None:
    """Print rows as a table in the terminal."""
    table = Table(title=title or None, caption=caption or None, title_justify="left", caption_justify="left")
    names = columns(rows)
    for name in names:
        numeric = all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
        # Folded, not cut: a number that has lost its last digits misleads.
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(text(row.get(name), digits) for name in names))
    console.print(table)


def markdown(rows: Sequence[Row], *, digits: int = 2) -> str:
    """The same table as GitHub Markdown."""
    names = columns(rows)
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(text(row.get(name), digits) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """What made a result: this package, the libraries under it, Python and the platform."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("spot-vit", "torch", "torchvision", "timm", "accelerate", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def save_json(path: str | Path, rows: Sequence[Row], settings: Mapping[str, Any] | None = None) -> None:
    """Write rows, the settings that made them and the versions, whole or not at all."""
    data = {"settings": dict(settings or {}), "versions": versions(), "rows": [dict(row) for row in rows]}
    write_json(path, data)


def track(items: Iterable[T], description: str, total: int | None = None, *, shown: bool = True) -> Iterator[T]:
    """Iterate with a progress bar that says how much time is left. Nothing is drawn without a terminal."""
    with progress(shown=shown) as bar:
        yield from bar.track(items, total=total, description=description)


def progress(*, shown: bool = True) -> Progress:
    """A progress display with time elapsed and left, on stderr."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=errors,
        disable=not (shown and errors.is_terminal),
    )
