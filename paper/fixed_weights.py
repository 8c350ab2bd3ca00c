"""The loss of accuracy from one set of weights at all budgets: `python -m paper.fixed_weights WEIGHTS VAL OUT.md`

A shipped retrofit has weights for every budget (spot.Family); spot.load uses those for 49 tokens by default.
This measures both on the same images: the weights for each budget, and those for 49 tokens at every budget.
"""

from pathlib import Path
from typing import Any

import spot
from paper.provenance import comment
from spot import report
from spot.evaluation.accuracy import Evaluation, Setting, evaluate
from spot.models.family import DEFAULT_TOKENS
from spot.models.shipped import ALIASES
from spot.store import whole
from tools.program import program

BUDGETS = (25, 49, 100, 196)


def measured(family: spot.Family, data: str) -> Evaluation:
    """Both sets of weights at every budget, isotropic, in one pass over the images."""
    fixed = family.model(DEFAULT_TOKENS)
    by_budget = [Setting("isotropic", tokens) for tokens in BUDGETS]
    same = [Setting("isotropic", tokens, name="fixed", model=fixed) for tokens in BUDGETS]
    return evaluate(family, data, [*by_budget, *same], title=family.name)


def rows_of(name: str, family: spot.Family, made: Evaluation) -> list[dict[str, Any]]:
    """Two rows: top-1 in percent with the weights for each budget, and with those for 49."""
    table = made.rows()
    rows = []
    for label, title in (("isotropic", "for each budget"), ("fixed", f"for {DEFAULT_TOKENS} tokens")):
        cells = {f"{row['tokens']} tokens": row["top1"] for row in table if row["placement"] == label}
        rows.append({"model": name, "weights": title, **cells, "images": table[0]["images"], "hash": family.hash})
    return rows


def main(weights: Path, val: Path, out: Path) -> None:
    """Measure both shipped retrofits and write the table."""
    rows = []
    for alias, name in ALIASES.items():
        family = spot.Family(alias, weights=weights / f"{name.removesuffix('+spot')}.safetensors")
        rows += rows_of(alias, family, measured(family, str(val)))
    report.show(rows, "Top-1, %")
    with whole(out) as temporary:
        words = "Top-1 in percent with isotropic tokens; hash: of the retrofit's weights. Written by "
        files = comment({alias: alias for alias in ALIASES})
        temporary.write_text(f"{words}`python -m paper.fixed_weights`.\n\n{files}\n\n{report.markdown(rows)}")


if __name__ == "__main__":
    program("fixed weights", __doc__, main, needed=3)
