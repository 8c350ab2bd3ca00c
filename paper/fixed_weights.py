"""The loss of accuracy from one set of weights at all budgets: `python -m paper.fixed_weights WEIGHTS VAL OUT.md`

A shipped retrofit has weights for every budget (spot.Family); spot.load uses those for 49 tokens by default.
This measures both on the same images: the weights for each budget, and those for 49 tokens at every budget.
"""

from pathlib import Path

from paper.program import program, shipped_retrofits
from paper.provenance import comment
from paper.study import page
from spot import report
from spot.evaluation.accuracy import Setting, evaluate
from spot.models.family import DEFAULT_TOKENS
from spot.models.shipped import ALIASES
from spot.store import write_text

BUDGETS = (25, 49, 100, 196)


def main(weights: Path, val: Path, out: Path) -> None:
    """Measure both shipped retrofits and write the table."""
    rows = []
    for alias, family in shipped_retrofits(weights):
        models = {"for each budget": None, f"for {DEFAULT_TOKENS} tokens": family.model(DEFAULT_TOKENS)}
        settings = [Setting("isotropic", n, name=each, model=model) for each, model in models.items() for n in BUDGETS]
        table = evaluate(family, str(val), settings, title=alias).rows()
        for each in models:
            cells = {f"{row['tokens']} tokens": row["top1"] for row in table if row["placement"] == each}
            rows.append({"model": alias, "weights": each, **cells, "images": table[0]["images"], "hash": family.hash})
    report.show(rows, "Top-1, %")
    about = "Top-1 in percent with isotropic tokens; hash: of the retrofit's weights. Written by "
    about += "`python -m paper.fixed_weights`."
    write_text(out, page(about, comment({alias: alias for alias in ALIASES}), report.markdown(rows)))


if __name__ == "__main__":
    program("paper.fixed_weights", main, __doc__)
