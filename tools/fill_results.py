"""Copy the studies' tables into docs/RESULTS.md: `python -m tools.fill_results`.

In that page, what stands between `<!-- results/scenes/off-grid.md -->` and `<!-- end -->` is the table of that file,
which `spot study off-grid --out docs/results/scenes` wrote. Run this after a study; nothing there is typed by hand.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"(<!-- (results/\S+\.md) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(page: str) -> str:
    """The first table of a study's page."""
    lines = page.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rest = [number for number in range(first, len(lines)) if not lines[number].startswith("|")]
    return "\n".join(lines[first : min(rest, default=len(lines))])


def filled(page: str, docs: Path = DOCS) -> str:
    """The page with every block filled from its file under docs."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{table((docs / block[2]).read_text())}\n\n{block[3]}", page)


if __name__ == "__main__":
    results = DOCS / "RESULTS.md"
    results.write_text(filled(results.read_text()))
