"""Results as tables in the terminal, Markdown, JSON or CSV.

A table is a list of rows (dicts with the same keys). `show` and `say` print to standard output, or to
standard error if data goes to standard output. `warn` prints to standard error. Names of files and
classes are untrusted text: they are printed literally, never as markup.
"""

import csv
import io
import math
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from spot.errors import InputError
from spot.store import atomic_write, write_json

T = TypeVar("T")
Row = Mapping[str, Any]

console = Console()
errors = Console(stderr=True)


def text(value: Any, digits: int = 2) -> str:
    """Format a cell: floats are rounded, None and NaN become a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return printable(str(value))


def printable(words: str) -> str:
    """Replace the bytes of a file name that are not UTF-8 by �, for terminals and figures."""
    return words.encode(errors="surrogateescape").decode(errors="replace")


def columns(rows: Sequence[Row]) -> list[str]:
    """The keys of all rows, in order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def show(rows: Sequence[Row], title: str = "", *, digits: int = 2, caption: str = "") -> None:
    """Print rows as a table. Columns that do not fit the width follow in another table, which repeats the first."""
    cells = {name: [name, *(text(row.get(name), digits) for row in rows)] for name in columns(rows)}
    sizes = {name: console.measure(Text("\n".join(cells[name]))).with_maximum(console.width - 4) for name in cells}
    narrowest = {name: size.minimum for name, size in sizes.items()}  # of the longest word, so that none is broken

    def excess(names: Sequence[str], widths: Mapping[str, int]) -> int:
        """The width that a table lacks; each column has a border and a space on either side."""
        return 1 + sum(widths[name] + 3 for name in names) - console.width

    tables: list[list[str]] = []
    for name in cells:
        if not tables or (len(tables[-1]) > 1 and excess([*tables[-1], name], narrowest) > 0):
            tables.append([next(iter(cells))])
        if name not in tables[-1]:
            tables[-1].append(name)
    # Title and caption are printed separately: rich would wrap them to the width of a narrow table.
    if title:
        console.print(Text(printable(title), style="italic"))
    for names in tables:
        table, widths = Table(), {name: sizes[name].maximum for name in names}
        for name in sorted(names, key=widths.__getitem__, reverse=True):  # the widest column wraps first
            widths[name] = max(narrowest[name], widths[name] - max(0, excess(names, widths)))
        for name in names:
            numeric = all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
            # A word wider than the terminal is folded, not cut: a cut number misleads.
            justify: Any = "right" if numeric else "left"
            table.add_column(Text(name), justify=justify, overflow="fold", width=widths[name])
        for line in zip(*(cells[name][1:] for name in names), strict=True):
            table.add_row(*map(Text, line))
        console.print(table)
    if caption:
        console.print(Text(printable(caption), style="dim italic"))


def say(sentence: str) -> None:
    """Print a sentence beside the results."""
    console.print(printable(sentence), soft_wrap=True, markup=False, highlight=False)


def warn(sentence: str) -> None:
    """Print a warning on standard error."""
    errors.print(printable(f"spot: {sentence}"), soft_wrap=True, markup=False, highlight=False)


def markdown(rows: Sequence[Row], *, digits: int = 2) -> str:
    """Format rows as a GitHub Markdown table."""
    names = columns(rows)
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(text(row.get(name), digits) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


@cache
def versions() -> dict[str, str]:
    """The versions of this package, its main dependencies, Python and the platform."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("spot-vit", "torch", "torchvision", "timm", "accelerate", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def command(program: str = "spot") -> str:
    """The command as typed, with absolute paths made relative, because results are read on other machines."""
    split = (
        [os.path.relpath(part) if os.path.isabs(part) else part for part in word.split("=")] for word in sys.argv[1:]
    )
    return shlex.join([*program.split(), *map("=".join, split)])


def save_json(path: str | Path | None, rows: Sequence[Row], settings: Mapping[str, Any] | None = None) -> None:
    """Write rows, settings and versions as JSON, unless path is None. "-" is standard output."""
    if path is None:
        return
    data = {"settings": dict(settings or {}), "versions": versions(), "rows": [dict(row) for row in rows]}
    write_json(path, data)


def save_csv(path: str | Path | None, rows: Sequence[Row]) -> None:
    """Write rows as CSV with a header, unless path is None. "-" is standard output."""
    if path is None:
        return
    lines = io.StringIO(newline="")
    writer = csv.DictWriter(lines, columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with atomic_write(path) as temporary:
        temporary.write_bytes(lines.getvalue().encode(errors="surrogateescape"))  # file names keep their bytes


def check_outputs(*files: Path | None, folder: Path | None = None) -> None:
    """Raise InputError for outputs that cannot be written, before the work begins. Creates nothing."""
    for file in [*files, folder]:
        if file is None or str(file) == "-":
            continue
        if file is not folder and file.is_dir():
            raise InputError(f"a file was expected for the results, but {file} is a folder; name a file in it")
        parents = [*([file] if file is folder else []), *file.absolute().parents]
        try:
            with tempfile.TemporaryFile(dir=next(parent for parent in parents if parent.exists())):
                pass
        except OSError as error:
            raise InputError(f"cannot write to {file}: {error.strerror}; choose another place") from error


def track(items: Iterable[T], description: str, total: int | None = None, *, shown: bool = True) -> Iterator[T]:
    """Iterate with a progress bar that shows the time left. It is shown only on a terminal."""
    with progress(shown=shown) as bar:
        yield from bar.track(items, total=total, description=description)


def progress(*, shown: bool = True) -> Progress:
    """A progress display with time elapsed and left, on stderr."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=errors,
        disable=not (shown and errors.is_terminal),
    )
