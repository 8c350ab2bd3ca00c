"""Do the paper's findings hold here? Read from the results of studies; nothing is measured.

A finding is a list of checks, each a difference with its 95 % interval. A check says yes if the
interval lies on the claim's side, no if it lies on the other, and else that it is not decided. A
finding holds if all its checks do, and does not if any says no: what is claimed in general is refuted
by one case, and the checks say which. Where the paper says "substantially", the difference must reach
SUBSTANTIAL points; where it says "slight", it must stay within SLIGHT percent.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from spot.errors import InputError
from spot.studies import classification, off_grid, robustness
from spot.studies.study import Result, Row

YES, NO, OPEN = "yes", "no", "not decided"
SUBSTANTIAL = 1.0  # percentage points
SLIGHT = 5.0  # percent of a token's saliency

CLAIMS = {
    "finding 1": "Off-grid placement is substantially better than the grid with few tokens.",
    "finding 2": "Object-centric priors are better with few tokens, even coverage with many.",
    "finding 3": "The search has a slight bias to salient places, and not more.",
    "finding 4": "Positions found with one model improve another with few tokens.",
    "robustness": "Harmful priors and adversarial searches degrade accuracy substantially.",
}
NEEDS = {
    "finding 1": ("off-grid", "classification"),
    "finding 2": ("classification",),
    "finding 3": ("saliency-gain",),
    "finding 4": ("transfer",),
    "robustness": ("robustness",),
}


@dataclass(frozen=True)
class Check:
    """One difference that a finding rests on, in points or percent, and what it says."""

    what: str
    value: float
    low: float
    high: float
    verdict: str

    def __str__(self) -> str:
        return f"{self.what}: {self.value:+.1f} ({self.low:+.1f} to {self.high:+.1f}), {self.verdict}"


def findings(results: Mapping[str, Result]) -> Result:
    """A row for each claim, with its verdict, and in `data` every check behind it."""
    rows: list[Row] = []
    checks: list[Row] = []
    for name, claim in CLAIMS.items():
        missing = [study for study in NEEDS[name] if study not in results]
        found = list(CHECKS[name](results))
        verdict = combined((check.verdict for check in found), complete=not missing)
        counts = {each: sum(check.verdict == each for check in found) for each in (YES, NO, OPEN)}
        row: Row = {"claim": name, "says": claim, "holds": verdict, **counts}
        row["rests on"] = ", ".join(f"{study} (missing)" if study in missing else study for study in NEEDS[name])
        rows.append(row)
        checks += [{"claim": name, **vars(check)} for check in found]
    return Result(rows, notes=notes(results), data={"checks": checks}, study="findings", settings=sources(results))


def combined(verdicts: Iterable[str], *, complete: bool = True) -> str:
    """One verdict of many: no if any is no, yes if all are yes and none is missing."""
    seen = list(verdicts)
    if NO in seen:
        return NO
    return YES if seen and complete and all(verdict == YES for verdict in seen) else OPEN


def more(what: str, value: float, low: float, high: float, *, least: float = 0.0) -> Check:
    """The claim that something is more, by at least `least`."""
    if low > 0 and value >= least:
        return Check(what, value, low, high, YES)
    return Check(what, value, low, high, NO if high < least or high <= 0 else OPEN)


def slight(what: str, value: float, low: float, high: float) -> Check:
    """The claim that something is no more than slight, either way."""
    if low > -SLIGHT and high < SLIGHT:
        return Check(what, value, low, high, YES)
    return Check(what, value, low, high, NO if low > SLIGHT or high < -SLIGHT else OPEN)


def turned(row: Row) -> tuple[float, float, float]:
    """A row's difference the other way round: isotropic minus the row's placement."""
    return 0 - row["delta"], 0 - row["delta_high"], 0 - row["delta_low"]  # and never −0


def off_grid_is_better(results: Mapping[str, Result]) -> Iterator[Check]:
    for row in rows_of(results, "off-grid"):
        if row["placement"] == off_grid.SUBPIXEL:
            what = f"{row['backbone']}, subpixel − grid, {row['steps']} steps at {row['lr']:g}"
            yield more(what, row["delta"], row["delta_low"], row["delta_high"], least=SUBSTANTIAL)
    rows = rows_of(results, "classification")
    for row in rows:
        if row["tokens"] == fewest(rows) and row["placement"] == classification.DROPOUT:
            what = f"{row['backbone']}, isotropic − plain ViT's patches, {row['tokens']} tokens"
            yield more(what, *turned(row), least=SUBSTANTIAL)


def objects_then_coverage(results: Mapping[str, Result]) -> Iterator[Check]:
    rows = rows_of(results, "classification")
    few, many = fewest(rows), max((row["tokens"] for row in rows), default=0)
    for row in rows:
        what = f"{row['backbone']}, {{}}, {row['tokens']} tokens"
        if row["tokens"] == few and row["placement"] in ("center", "salient"):
            name = what.format(f"{row['placement']} − isotropic")
            yield more(name, row["delta"], row["delta_low"], row["delta_high"])
        if row["tokens"] == many > few and row["placement"] in ("uniform", "salient"):
            yield more(what.format(f"isotropic − {row['placement']}"), *turned(row))


def saliency_is_slight(results: Mapping[str, Result]) -> Iterator[Check]:
    for row in rows_of(results, "saliency-gain"):
        what = f"{row['backbone']}, saliency gained beyond the control, {row['tokens']} tokens"
        yield slight(what, row["excess"], row["excess_low"], row["excess_high"])


def positions_transfer(results: Mapping[str, Result]) -> Iterator[Check]:
    for row in rows_of(results, "transfer"):
        what = f"{row['source']} → {row['target']}, transfer − isotropic"
        yield more(what, row["delta"], row["delta_low"], row["delta_high"])


def harm_degrades(results: Mapping[str, Result]) -> Iterator[Check]:
    for row in rows_of(results, "robustness"):
        if row["placement"] in robustness.HARMS:
            what = f"{row['backbone']}, isotropic − {row['placement']}"
            yield more(what, row["drop"], row["drop_low"], row["drop_high"], least=SUBSTANTIAL)


CHECKS = {
    "finding 1": off_grid_is_better,
    "finding 2": objects_then_coverage,
    "finding 3": saliency_is_slight,
    "finding 4": positions_transfer,
    "robustness": harm_degrades,
}


def rows_of(results: Mapping[str, Result], study: str) -> list[Row]:
    return results[study].rows if study in results else []


def fewest(rows: Iterable[Row]) -> int:
    return min((row["tokens"] for row in rows), default=0)


def sources(results: Mapping[str, Result]) -> Row:
    """Which results were read, and on what they were measured."""
    kept = ("models", "data", "images", "oracle_images", "seeds", "saliency")
    return {name: {key: result.settings.get(key) for key in kept} for name, result in results.items()}


def notes(results: Mapping[str, Result]) -> list[str]:
    text = [
        f"A check is yes or no where its 95 % interval says so; substantially is {SUBSTANTIAL:g} point or more, slight "
        f"within {SLIGHT:g} % either way. One no refutes a claim, and the checks say where.",
        "Finding 3 also says that tokens depend on each other more than on saliency; no study measures that.",
    ]
    measured = {str(result.settings.get("data")) for result in results.values()}
    if len(measured) > 1:
        text.append(f"The results are of different data ({', '.join(sorted(measured))}); a claim may rest on both.")
    return text


def read(folder: str | Path) -> Result:
    """The findings by the results in a folder."""
    needed = dict.fromkeys(study for studies in NEEDS.values() for study in studies)
    paths = {study: Path(folder) / f"{study}.json" for study in needed}
    results = {study: Result.load(path) for study, path in paths.items() if path.is_file()}
    if not results:
        raise InputError(f"there is no result of {', '.join(needed)} in {folder}; run spot study all first")
    return findings(results)


def markdown(result: Result) -> str:
    """A page: the verdicts, then the checks behind them."""
    from spot import report

    parts = ["# findings", report.markdown(result.rows), "\n".join(f"- {note}" for note in result.notes)]
    parts += ["## Checks", report.markdown(lines(result))]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def lines(result: Result) -> list[Row]:
    """The checks as a person reads them."""
    return [
        {
            "claim": row["claim"],
            "difference": row["what"],
            "value": f"{row['value']:+.1f}",
            "95 %": f"{row['low']:+.1f} to {row['high']:+.1f}",
            "says": row["verdict"],
        }
        for row in result.data["checks"]
    ]
