"""Do the paper's findings hold here? The answer is computed from the results of studies, without measuring.

A finding is a list of checks, each a difference with its 95 % interval. A check is "yes" if the interval
lies on the claim's side, "no" if it lies on the other side, and otherwise not decided. A finding holds if
all its checks are yes. It does not hold if any check is no, because one case refutes a general claim.
Among many checks one may be no by chance. A no must therefore pass Holm's correction over the checks of
its claim: if the claim is true, the chance of any no is that of a single check. A finding needs every
check to be yes, so a yes needs no correction. If the paper says "substantially", the difference must reach
SUBSTANTIAL points; if it says "slight", there must be an effect below SLIGHT percent.

If the paper's own comparison allows another explanation of its claim, a comparison with a control decides
instead. The paper's comparison is still shown, as "the paper's design", but does not count.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist

from paper import classification, off_grid, priors, robustness
from paper.study import Result, Row, page
from spot import report
from spot.errors import InputError

YES, NO, OPEN = "yes", "no", "not decided"
SUBSTANTIAL = 1.0  # percentage points
SLIGHT = 5.0  # percent of a token's saliency
ALPHA = 0.025  # on each side of a 95 % interval
SETTINGS = ("models", "data", "images", "oracle_images", "seeds", "saliency")  # of a result that is read


@dataclass(frozen=True)
class Check:
    """One difference that a finding depends on, in points or percent, and its result."""

    what: str
    value: float
    low: float
    high: float
    result: str
    against: float = 1.0  # p of the claim's opposite, one-sided, before correction
    decides: bool = True  # False for the paper's design, if it allows another explanation


def more(what: str, value: float, low: float, high: float, *, least: float = 0.0) -> Check:
    """Check the claim that a value is larger, by at least `least`."""
    against = tail(least - value, high - value)
    yes, no = low > 0 and value >= least, against < ALPHA
    return Check(what, value, low, high, YES if yes else NO if no else OPEN, against)


substantially = partial(more, least=SUBSTANTIAL)


def slight(what: str, value: float, low: float, high: float) -> Check:
    """Check the claim that a value is larger, but only slightly."""
    against = min(tail(0 - value, high - value), tail(value - SLIGHT, value - low))
    yes, no = low > 0 and high < SLIGHT, against < ALPHA
    return Check(what, value, low, high, YES if yes else NO if no else OPEN, against)


def tail(distance: float, half: float) -> float:
    """One-sided p of a value at this distance from a bound; half: half-width of its 95 % interval towards the bound."""
    if half <= 0:
        return 0.0 if distance >= 0 else 1.0
    return NormalDist().cdf(-distance / half * NormalDist().inv_cdf(1 - ALPHA))


def holm(checks: Sequence[Check]) -> list[Check]:
    """The checks of a claim; a no remains only if it passes Holm's step-down correction over all of them."""
    order = sorted(range(len(checks)), key=lambda number: checks[number].against)
    judged, still = list(checks), True
    for rank, number in enumerate(order):
        still = still and checks[number].against < ALPHA / (len(checks) - rank)
        if checks[number].result == NO and not still:
            judged[number] = replace(checks[number], result=OPEN)
    return judged


def combined(results: Iterable[str], *, complete: bool = True) -> str:
    """Combine results: no if any is no, yes if all are yes and none is missing."""
    seen = set(results)
    return NO if NO in seen else YES if seen == {YES} and complete else OPEN


@dataclass(frozen=True)
class Rule:
    """Selects the rows of a study that are checks of a claim."""

    claim: str
    study: str
    what: str  # description of the difference, with values of the row
    name: str = "delta"  # the difference's column
    placements: Sequence[str] = ()  # of the row; by default any
    budget: str = ""  # few or many: only rows with the smallest or the largest budget; fewer: all but the largest
    turned: bool = False  # reverse the sign of the difference
    check: Callable[..., Check] = more
    decides: bool = True

    def applies(self, row: Row, budgets: Sequence[int]) -> bool:
        """Whether a row of the study, with these budgets in ascending order, is a check."""
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
    """A row for each claim and whether it holds; `data` has all its checks."""
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
        f"A check is yes or no if its 95 % interval lies on one side. “Substantially” means {SUBSTANTIAL:g} point or "
        f"more, “slight” above 0 and below {SLIGHT:g} %. A no must also pass Holm's correction over the checks of its "
        "claim; its p is one-sided and computed from the interval. One no refutes a claim.",
        "The paper's design compares searched positions with the same positions moved to the grid, retrofitted models "
        "with plain models, and transferred with isotropic positions. Each difference has another possible cause: "
        "any move of that length, the training, any move at all. So comparisons that exclude it decide.",
        "Finding 3 also claims that tokens depend on each other more than on saliency; no study measures that.",
    ]
    data = {str(result.settings.get("data")) for result in results.values()}
    if len(data) > 1:
        notes.append(f"The results are of different data ({', '.join(sorted(data))}); a claim may rest on both.")
    missing = [study for study in NEEDED if study not in results]
    if missing:
        commands = "; ".join(f"python -m paper {study}" for study in missing)
        notes.append(f"Missing results are measured by {commands}, with the models and images of the others.")
    settings = {name: {key: each.settings.get(key) for key in SETTINGS} for name, each in results.items()}
    return Result(rows, notes=notes, data={"checks": checks}, study="findings", settings=settings)


def checked(claim: str, study: str, rows: Sequence[Row]) -> list[Check]:
    """The checks of a claim in one study's rows."""
    rules = [rule for rule in RULES if (rule.claim, rule.study) == (claim, study)]
    budgets = sorted({row["tokens"] for row in rows if "tokens" in row})
    return [rule.of(row) for row in rows for rule in rules if rule.applies(row, budgets)]


def read(folder: str | Path) -> Result:
    """The findings from the results in a folder."""
    paths = {study: Path(folder) / f"{study}.json" for study in NEEDED}
    results = {study: Result.load(path) for study, path in paths.items() if path.is_file()}
    if not results:
        raise InputError(f"there is no result of {', '.join(NEEDED)} in {folder}; run python -m paper all first")
    return findings(results)


def markdown(result: Result) -> str:
    """A page: the claims, then their checks."""
    checks = ("## Checks", report.markdown(lines(result)))
    return page("# findings", report.markdown(result.rows), result.notes, *checks)


def lines(result: Result) -> list[Row]:
    """The checks, formatted for display."""
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
