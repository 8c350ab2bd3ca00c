"""Results for people and for programs: one table, shown in the terminal, as Markdown, JSON or CSV.

A table is a list of rows (dicts with the same keys). Everything for people goes through `show` and
`say` (standard output, or standard error where data goes to standard output) and `warn` (standard
error). Names of files and classes come from outside: they are shown as they are, never as markup.
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

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from spot.errors import InputError
from spot.store import whole, write_json

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
    return printable(str(value))


def printable(words: str) -> str:
    """Text that every terminal and picture can show: bytes of a file name that are not UTF-8 become �."""
    return words.encode(errors="surrogateescape").decode(errors="replace")


def columns(rows: Sequence[Row]) -> list[str]:
    """The keys of all rows, in order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def show(rows: Sequence[Row], title: str = "", *, digits: int = 2, caption: str = "") -> None:
    """Print rows as a table. Where its columns do not fit side by side, the others follow below."""
    names = columns(rows)
    cells = {name: [text(row.get(name), digits) for row in rows] for name in names}
    parts = _fitting(names, {name: _least([name, *cells[name]]) for name in names})
    # Title and caption are not the table's own: rich would break their words to fit a narrow table.
    if title:
        console.print(Text(printable(title), style="italic"))
    for part in parts:
        table = Table()
        for name, width in _widths({name: [name, *cells[name]] for name in part}).items():
            numeric = all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
            # Folded, not cut, where a single word is wider than the terminal: a cut number misleads.
            table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold", width=width)
        for index in range(len(rows)):
            table.add_row(*(Text(cells[name][index]) for name in part))
        console.print(table)
    if caption:
        console.print(Text(printable(caption), style="dim italic"))


def _widths(columns: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """A width for each column: its longest word, and a fair share of what room there is up to its longest cell."""
    least = {name: min(_least(cells), console.width - 4) for name, cells in columns.items()}
    more = {name: max(cell_len(cell) for cell in cells) - least[name] for name, cells in columns.items()}
    room = console.width - 1 - sum(width + 3 for width in least.values())
    widths = dict(least)
    for left, name in enumerate(sorted(more, key=more.__getitem__)):
        given = max(0, min(more[name], room // (len(more) - left)))
        widths[name] += given
        room -= given
    return widths


def _least(cells: Sequence[str]) -> int:
    """How wide a column is at least: its longest word."""
    return max((cell_len(word) for cell in cells for word in cell.split()), default=1)


def _fitting(names: Sequence[str], least: Mapping[str, int]) -> list[list[str]]:
    """Columns in as few tables as fit the terminal, the first column in each."""
    parts: list[list[str]] = []
    room = 0
    for name in names:
        needed = least[name] + 3  # its border and a space on either side
        if not parts or (needed > room and len(parts[-1]) > 1):
            again = [] if not parts else [names[0]]
            parts.append(again)
            room = console.width - 1 - sum(least[each] + 3 for each in again)
        parts[-1].append(name)
        room -= needed
    return parts


def say(sentence: str) -> None:
    """A sentence for people, beside the results."""
    console.print(printable(sentence), soft_wrap=True, markup=False, highlight=False)


def warn(sentence: str) -> None:
    """Something a person should know, on standard error."""
    errors.print(printable(f"spot: {sentence}"), soft_wrap=True, markup=False, highlight=False)


def markdown(rows: Sequence[Row], *, digits: int = 2) -> str:
    """The same table as GitHub Markdown."""
    names = columns(rows)
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(text(row.get(name), digits) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


@cache
def versions() -> dict[str, str]:
    """The versions of this package, the libraries under it, Python and the platform."""
    made = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("spot-vit", "torch", "torchvision", "timm", "accelerate", "numpy"):
        try:
            made[name] = version(name)
        except PackageNotFoundError:
            made[name] = "absent"
    return made


def command(program: str = "spot") -> str:
    """What was typed, with absolute paths as seen from this folder: results are read on other machines."""
    split = (
        [os.path.relpath(part) if os.path.isabs(part) else part for part in word.split("=")] for word in sys.argv[1:]
    )
    return shlex.join([*program.split(), *map("=".join, split)])


def save_json(path: str | Path | None, rows: Sequence[Row], settings: Mapping[str, Any] | None = None) -> None:
    """Write rows, the settings that made them and the versions, if a file is named; "-" is standard output."""
    if path is None:
        return
    data = {"settings": dict(settings or {}), "versions": versions(), "rows": [dict(row) for row in rows]}
    write_json(path, data)


def save_csv(path: str | Path | None, rows: Sequence[Row]) -> None:
    """Write rows under their column names, if a file is named; "-" is standard output."""
    if path is None:
        return
    lines = io.StringIO(newline="")
    writer = csv.DictWriter(lines, columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with whole(path) as temporary:
        temporary.write_bytes(lines.getvalue().encode(errors="surrogateescape"))  # file names keep their bytes


def check_outputs(*files: Path | None, folder: Path | None = None) -> None:
    """Refuse files, or a folder for them, that cannot be written, before the work is done. Creates nothing."""
    for file in [*files, folder]:
        if file is None or str(file) == "-":
            continue
        if file is not folder and file.is_dir():
            raise InputError(f"a file was expected for the results, but {file} is a folder; name a file in it")
        there = next(each for each in (file, *file.absolute().parents) if each.exists())
        try:
            if there == file != folder:  # a file or device that is there: only its folder matters, or nothing
                there = file.parent
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            hint = "choose another folder" if file is folder else "choose another place"
            raise InputError(f"cannot write to {file}: {error.strerror}; {hint}") from error


def track(items: Iterable[T], description: str, total: int | None = None, *, shown: bool = True) -> Iterator[T]:
    """Iterate with a progress bar that says how much time is left. Nothing is drawn without a terminal."""
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
