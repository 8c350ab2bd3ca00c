"""Do the paper's findings hold here? Read from the results of studies; nothing is measured.

A finding is a list of checks, each a difference with its 95 % interval. A check says yes if the
interval lies on the claim's side, no if it lies on the other, and else that it is not decided. A
finding holds if all its checks do, and does not if any says no: what is claimed in general is refuted
by one case, and the checks say which. Of many checks one would say no by chance, so a no must pass
Holm's correction over the checks of its claim: if the claim is true, the chance of any no is that of one
check alone. A finding needs all yes, so a yes needs no correction. Where the paper says "substantially",
the difference must reach SUBSTANTIAL points; where it says "slight", there must be an effect, and it must
stay below SLIGHT percent.

Where the paper's own comparison cannot tell its claim from something else, a comparison that can decides
instead, and the paper's is shown as its design: it says yes or no, and decides nothing.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist

from paper import classification, off_grid, priors, robustness
from paper.study import STUDIES, Result, Row, page
from spot import report
from spot.errors import InputError

YES, NO, OPEN = "yes", "no", "not decided"
SUBSTANTIAL = 1.0  # percentage points
SLIGHT = 5.0  # percent of a token's saliency
ALPHA = 0.025  # on each side of a 95 % interval
SETTINGS = ("models", "data", "images", "oracle_images", "seeds", "saliency")  # of a result that is read


@dataclass(frozen=True)
class Check:
    """One difference that a finding rests on, in points or percent, and what it says."""

    what: str
    value: float
    low: float
    high: float
    result: str
    against: float = 1.0  # p of the claim's opposite, one-sided, before correction
    decides: bool = True  # or is the paper's design, which leaves another explanation


def more(what: str, value: float, low: float, high: float, *, least: float = 0.0) -> Check:
    """The claim that something is more, by at least `least`."""
    against = tail(least - value, high - value)
    yes, no = low > 0 and value >= least, against < ALPHA
    return Check(what, value, low, high, YES if yes else NO if no else OPEN, against)


substantially = partial(more, least=SUBSTANTIAL)


def slight(what: str, value: float, low: float, high: float) -> Check:
    """The claim that something is more, and no more than slightly."""
    against = min(tail(0 - value, high - value), tail(value - SLIGHT, value - low))
    yes, no = low > 0 and high < SLIGHT, against < ALPHA
    return Check(what, value, low, high, YES if yes else NO if no else OPEN, against)


def tail(distance: float, half: float) -> float:
    """One-sided p that a value so far beyond a bound is chance; half is the side of its 95 % interval that faces it."""
    if half <= 0:
        return 0.0 if distance >= 0 else 1.0
    return NormalDist().cdf(-distance / half * NormalDist().inv_cdf(1 - ALPHA))


def holm(checks: Sequence[Check]) -> list[Check]:
    """The checks of a claim, where a no stays only if it passes Holm's step-down correction over all of them."""
    order = sorted(range(len(checks)), key=lambda number: checks[number].against)
    judged, still = list(checks), True
    for rank, number in enumerate(order):
        still = still and checks[number].against < ALPHA / (len(checks) - rank)
        if checks[number].result == NO and not still:
            judged[number] = replace(checks[number], result=OPEN)
    return judged


def combined(results: Iterable[str], *, complete: bool = True) -> str:
    """One result of many: no if any is no, yes if all are yes and none is missing."""
    seen = set(results)
    return NO if NO in seen else YES if seen == {YES} and complete else OPEN


@dataclass(frozen=True)
class Rule:
    """Which rows of a study are checks of a claim."""

    claim: str
    study: str
    what: str  # the difference in words, with values of the row
    name: str = "delta"  # of the difference in the row
    placements: Sequence[str] = ()  # of the row; by default any
    budget: str = ""  # few or many: only rows with the fewest or the most tokens; fewer: all but the most
    turned: bool = False  # the difference the other way round
    check: Callable[..., Check] = more
    decides: bool = True

    def applies(self, row: Row, budgets: Sequence[int]) -> bool:
        """Whether a row of the study, with these budgets in rising order, is a check."""
        if self.budget == "many" and len(budgets) < 2:
            return False
        wanted = {"few": budgets[:1], "many": budgets[-1:], "fewer": budgets[: max(1, len(budgets) - 1)]}
        here = row.get("tokens") in wanted.get(self.budget, [row.get("tokens")]) and self.name in row
        return here and (not self.placements or row["placement"] in self.placements)

    def of(self, row: Row) -> Check:
        value, low, high = (row[self.name + end] for end in ("", "_low", "_high"))
        if self.turned:
            value, low, high = 0 - value, 0 - high, 0 - low  # and never −0
        return replace(self.check(self.what.format_map(row), value, low, high), decides=self.decides)


RULES = (
    Rule(
        "finding 1", "off-grid", "{backbone}, searched, then moved as far any way − to the grid, {steps} steps",
        placements=[off_grid.MOVED], check=substantially,
    ),
    Rule(
        "finding 1", "off-grid", "{backbone}, trials off − on the grid, {passes} forward passes",
        placements=[off_grid.FREE_TRIALS], check=substantially,
    ),
    Rule(
        "finding 1", "classification", "{backbone}, isotropic − random patches, same weights, {tokens} tokens",
        placements=[classification.SAME_DROPOUT], budget="few", turned=True, check=substantially,
    ),
    Rule(
        "finding 1", "off-grid", "{backbone}, searched subpixel − moved to the grid, {steps} steps at {lr:g}",
        placements=[off_grid.SUBPIXEL], check=substantially, decides=False,
    ),
    Rule(
        "finding 1", "classification", "{backbone}, isotropic, retrofitted − plain ViT's patches, {tokens} tokens",
        placements=[classification.DROPOUT], budget="few", turned=True, check=substantially, decides=False,
    ),
    Rule(
        "finding 2", "classification", "{backbone}, {placement} − isotropic, {tokens} tokens",
        placements=[priors.CENTER, "salient"], budget="few",
    ),
    Rule(
        "finding 2", "classification", "{backbone}, isotropic − {placement}, {tokens} tokens",
        placements=["uniform", priors.CENTER, "salient"], budget="many", turned=True,
    ),
    Rule(
        "finding 3", "saliency-gain", "{backbone}, saliency gained beyond the control, {tokens} tokens", "excess",
        budget="fewer", check=slight,
    ),
    Rule("finding 4", "transfer", "{source} → {target}, transfer − another image's positions", "excess"),
    Rule("finding 4", "transfer", "{source} → {target}, transfer − isotropic", decides=False),
    Rule(
        "robustness", "robustness", "{backbone}, isotropic − {placement}", "drop",
        placements=robustness.HARMS, check=substantially,
    ),
)  # fmt: skip
CLAIMS = {
    "finding 1": "Off-grid placement is substantially better than the grid with few tokens.",
    "finding 2": "Object-centric priors are better with few tokens, even coverage with many.",
    "finding 3": "The search has a slight bias to salient places, more than any move, and not more than slight.",
    "finding 4": "Positions found with one model improve another with few tokens.",
    "robustness": "Harmful priors and adversarial searches degrade accuracy substantially.",
}
NEEDED = tuple(dict.fromkeys(rule.study for rule in RULES))


def findings(results: Mapping[str, Result]) -> Result:
    """A row for each claim, whether it holds, and in `data` every check behind it."""
    rows: list[Row] = []
    checks: list[Row] = []
    for name, says in CLAIMS.items():
        needs = list(dict.fromkeys(rule.study for rule in RULES if rule.claim == name))
        own = [check for study in needs if study in results for check in checked(name, study, results[study].rows)]
        deciding, designed = (holm([each for each in own if each.decides == decides]) for decides in (True, False))
        own = deciding + designed
        holds = combined((each.result for each in deciding), complete=all(study in results for study in needs))
        counts: Row = {each: sum(check.result == each for check in deciding) for each in (YES, NO, OPEN)}
        design = combined(each.result for each in designed)
        counts |= {"the paper's design says": design if designed else "the same"}
        rests = ", ".join(study if study in results else f"{study} (missing)" for study in needs)
        rows.append({"claim": name, "says": says, "holds": holds, **counts, "rests on": rests})
        checks += [{"claim": name, **vars(each)} for each in own]
    notes = [
        f"A check is yes or no where its 95 % interval says so; substantially is {SUBSTANTIAL:g} point or more, slight "
        f"above 0 and below {SLIGHT:g} %. A no must also pass Holm's correction over the checks of its claim (p, "
        "one-sided, from the interval, is of the claim's opposite). One no refutes a claim, and the checks say where.",
        "The paper's design compares searched positions with the same moved to the grid, retrofitted models with plain "
        "ones, and transfer with isotropic tokens. Each leaves another explanation (any move of that length, the "
        "training, any move at all), so comparisons without it decide.",
        "Finding 3 also says that tokens depend on each other more than on saliency; no study measures that.",
    ]
    data = {str(result.settings.get("data")) for result in results.values()}
    if len(data) > 1:
        notes.append(f"The results are of different data ({', '.join(sorted(data))}); a claim may rest on both.")
    missing = [study for study in NEEDED if study not in results]
    if missing:
        notes.append(f"What is missing is measured by {'; '.join(command_for(study, results) for study in missing)}.")
    settings = {name: {key: each.settings.get(key) for key in SETTINGS} for name, each in results.items()}
    return Result(rows, notes=notes, data={"checks": checks}, study="findings", settings=settings)


def checked(claim: str, study: str, rows: Sequence[Row]) -> list[Check]:
    """The checks of a claim in one study's rows."""
    rules = [rule for rule in RULES if (rule.claim, rule.study) == (claim, study)]
    budgets = sorted({row["tokens"] for row in rows if "tokens" in row})
    return [rule.of(row) for row in rows for rule in rules if rule.applies(row, budgets)]


def command_for(study: str, results: Mapping[str, Result]) -> str:
    """What measures a study, on the same models and images as one of the results."""
    for result in results.values():
        words = shlex.split(result.settings.get("command", ""))
        for name in (*STUDIES, "all"):
            if name in words[2:4]:  # python -m paper NAME …; results of version 0.2 have python -m paper NAME …
                return shlex.join(["python", "-m", "paper", study, *words[words.index(name) + 1 :]])
    return f"python -m paper {study}"


def read(folder: str | Path) -> Result:
    """The findings by the results in a folder."""
    paths = {study: Path(folder) / f"{study}.json" for study in NEEDED}
    results = {study: Result.load(path) for study, path in paths.items() if path.is_file()}
    if not results:
        raise InputError(f"there is no result of {', '.join(NEEDED)} in {folder}; run python -m paper all first")
    return findings(results)


def markdown(result: Result) -> str:
    """A page: the claims, then the checks behind them."""
    checks = ("## Checks", report.markdown(lines(result)))
    return page("# findings", report.markdown(result.rows), result.notes, *checks)


def lines(result: Result) -> list[Row]:
    """The checks as a person reads them."""
    return [
        {
            "claim": row["claim"],
            "difference": row["what"],
            "value": f"{row['value']:+.1f}",
            "95 %": f"{row['low']:+.1f} to {row['high']:+.1f}",
            "p against": f"{row['against']:.2g}",
            "says": row["result"] if row["decides"] else f"{row['result']} (the paper's design)",
        }
        for row in result.data["checks"]
    ]
