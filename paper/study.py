"""A study: a question of the paper, our measurement, and the paper's own numbers for comparison.

A study is a module of this package with a `STUDY`. `run` measures with a Lab and returns a Result, which
contains only JSON values. Tables and figures are made from the Result alone, so that they can be redrawn
without measuring again.

    rows     one dict per line, numbers in percent, with "low" and "high" the 95 % interval
    paper    the paper's lines, with the same names for the same quantities
    notes    sentences on differences, on lines that could not be measured, and on slips in the paper
    data     other values that a figure needs

To add a study, write such a module and list its name in STUDIES.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from paper.lab import PAPER_IMAGES, Lab
from paper.provenance import sentence
from spot import report
from spot.errors import InputError, unknown
from spot.store import read_json, write_text

STUDIES = (
    "off-grid", "priors", "saliency-gain", "transfer", "classification", "robustness", "tome", "elastic",
    "needle", "anytime", "speed", "retrofit",
)  # fmt: skip

Row = dict[str, Any]
Table = Mapping[str, str | Callable[[Row], Any]]  # column → name in the rows, or a function of a row


@dataclass
class Result:
    """The result of a study, in JSON values only."""

    rows: list[Row]
    paper: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: Row = field(default_factory=dict)
    data: Row = field(default_factory=dict)
    study: str = ""
    versions: dict[str, str] = field(default_factory=report.versions)

    def save(self, path: str | Path) -> None:
        """Write the file atomically."""
        write_text(path, json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Result":
        """Read a file; refuses damaged ones, and those of a version with other fields."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"there is no result {path}; run python -m paper {path.stem} first")
        what = f"a study's result; run python -m paper {path.stem} again"
        content = read_json(path, what)
        try:
            return cls(**{name: value for name, value in content.items() if name != "format"})  # of version 0.2
        except (AttributeError, TypeError):
            raise InputError(f"{path} is damaged, or not {what}") from None


@dataclass(frozen=True)
class Study:
    """A question of the paper.

    table: the columns for display, for our rows and the paper's.
    """

    name: str
    paper: str  # the label of its table or figure in the paper's source
    question: str
    run: Callable[[Lab], Result]
    draw: Callable[[Result], Figure]
    table: Callable[[Result], list[Row]] | Table

    def lines(self, result: Result) -> list[Row]:
        """The table, formatted for display."""
        if callable(self.table):
            return self.table(result)
        return formatted([*result.rows, *result.paper], self.table)

    def markdown(self, result: Result) -> str:
        """A page: the question, the table, the notes, the figure."""
        asked = f"{self.question} (the paper's `{self.paper}`)"
        table, figure = report.markdown(self.lines(result)), f"![{self.name}]({self.name}.png)"
        return page(f"# {self.name}", asked, table, result.notes, figure, sentence(result.settings))

    def show(self, result: Result) -> None:
        """Show the page in the terminal."""
        report.show(self.lines(result), f"{self.name}: {self.question}", caption="\n".join(result.notes))


def formatted(rows: Sequence[Row], table: Table) -> list[Row]:
    """Rows with the columns of a table."""
    return [
        {name: row.get(show) if isinstance(show, str) else show(row) for name, show in table.items()} for row in rows
    ]


def page(*parts: str | Sequence[str]) -> str:
    """Markdown of parts, separated by empty lines; several sentences become a list."""
    texts = [part if isinstance(part, str) else "\n".join(f"- {note}" for note in part) for part in parts]
    return "\n\n".join(text.rstrip() for text in texts if text) + "\n"


def find_study(name: str) -> Study:
    """The study with a name in STUDIES."""
    if name not in STUDIES:
        raise unknown("study", name, [*STUDIES, "all", "findings"])
    study: Study = import_module(f"paper.{name.replace('-', '_')}").STUDY
    return study


def figure(
    plot: Callable[..., Figure],
    rows: Callable[[Result], Sequence[Row]] | None = None,
    *,
    title: str = "",
    **options: Any,
) -> Callable[[Result], Figure]:
    """A function that draws a study: a plot of our rows and the paper's, or of the given rows.

    The title may name values of the first row, as in "with {tokens} tokens".
    """

    def draw(result: Result) -> Figure:
        drawn = [*result.rows, *result.paper] if rows is None else rows(result)
        return plot(drawn, title=title.format_map((result.rows or [{}])[0]), **options)

    return draw


def each_value(rows: Sequence[Row], values: Mapping[str, tuple[str, str, str]]) -> list[Row]:
    """Split each row into one row per number, for figures: `what`, `value` and the interval `low` and `high`.

    values: what → the names of the number and of its interval's ends.
    """
    return [
        {**row, "what": what, "value": row[value], "low": row.get(low), "high": row.get(high)}
        for row in rows
        for what, (value, low, high) in values.items()
        if row.get(value) is not None
    ]


def with_counts(result: Result, line: str) -> list[Row]:
    """Our rows and the paper's; the line of a row with fewer images than others includes their number."""
    most = max((row.get("images", 0) for row in result.rows), default=0)
    fewer = {row[line]: row["images"] for row in result.rows if row.get("images", most) < most}
    papers = {row[line] for row in result.paper}
    names = {name: f"{name} ({'ours: ' * (name in papers)}{count:,} images)" for name, count in fewer.items()}
    return [{**row, line: names.get(row[line], row[line])} for row in [*result.rows, *result.paper]]


def paper_row(backbone: str, **values: Any) -> Row:
    """A line of the paper."""
    return {"backbone": f"paper: {backbone}", "images": PAPER_IMAGES, **values}


def cell(row: Row, value: str = "top1", low: str = "low", high: str = "high") -> str:
    """A number with its interval, for tables: 44.1 (41.0–47.2)."""
    return _with_interval(row, (value, low, high), ".1f", "–")


def signed(row: Row, value: str = "delta", digits: int = 1) -> str:
    """A difference with its sign and interval, or nothing if the row has none: +3.2 (+1.0 to +5.4)."""
    if value not in row:
        return ""
    return _with_interval(row, (value, f"{value}_low", f"{value}_high"), f"+.{digits}f", " to ")


def number(name: str, form: str) -> Callable[[Row], str]:
    """A column with a number of the rows in this format, as in number("p", ".2g"); empty where a row has none."""
    return lambda row: format(row[name], form) if name in row else ""


def _with_interval(row: Row, names: Sequence[str], form: str, between: str) -> str:
    value, low, high = (row.get(name) for name in names)
    if value is None:
        return "–"
    interval = "" if low is None or high is None else f" ({low:{form}}{between}{high:{form}})"
    return f"{value:{form}}{interval}"


def by_budget(ours: Sequence[Row], papers: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Every row with the name of its budget. If both have equally many budgets, the paper's rows use our names."""
    here, there = (sorted({row["tokens"] for row in rows}) for rows in (ours, papers))
    for rows, budgets in ((ours, here), (papers, there)):
        for row in rows:
            place = budgets.index(row["tokens"])
            name = f"{(here if len(here) == len(there) else budgets)[place]} tokens"
            same = len(here) != len(there) or here[place] == there[place]
            yield row, name if same else f"{name} (paper: {there[place]})"


def pivot(rows: Sequence[Row], index: Sequence[str], column: str, show: Callable[[Row], Any]) -> list[Row]:
    """A line for each value of `index`, a column for each value of `column`, in order of appearance."""
    lines: dict[tuple[Any, ...], Row] = {}
    heads = list(dict.fromkeys(str(row[column]) for row in rows))
    for row in rows:
        about = {name: row.get(name) for name in index}
        lines.setdefault(tuple(about.values()), about | dict.fromkeys(heads))[str(row[column])] = show(row)
    return list(lines.values())
