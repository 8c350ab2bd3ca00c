"""Put the results of studies into README.md and docs/RESULTS.md: `python -m tools.fill_results`.

What stands between `<!-- results/scenes/off-grid.md -->` and `<!-- end -->` is the table of that file, which
`spot study off-grid --out docs/results/scenes` wrote; between `<!-- accuracy: results/….json -->` and `<!-- end -->`
stands accuracy by placement and budget, of rows measured on the same images. Run this after a study; nothing there
is typed by hand.
"""

import json
import re
from pathlib import Path

from spot import report

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", DOCS / "RESULTS.md")
BLOCK = re.compile(
    r"(<!-- (?:accuracy: )?((?:results|\.\./spot/assets)/\S+\.(?:md|json)) -->\n).*?(<!-- end -->)", re.DOTALL
)
# The README's rows: a placement as studies call it, and as the README does.
SHOWN = {
    "ViT, patch dropout": "random patches, not retrofitted",
    "ViT, smaller image": "a smaller image, not retrofitted",
    "patch dropout, SPoT's weights": "random patches",
    "smaller image, SPoT's weights": "a smaller image",
    "isotropic": "`isotropic`",
    "center": "`center`",
    "focus": "`focus`",
}


def table(page: str) -> str:
    """The first table of a study's page."""
    lines = page.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rest = [number for number in range(first, len(lines)) if not lines[number].startswith("|")]
    return "\n".join(lines[first : min(rest, default=len(lines))])


def accuracy(result: str) -> str:
    """Top-1 by placement and budget from a study's JSON, and what the smallest costs with its map.

    All of it must be of the same images.
    """
    rows = [row for row in json.loads(result)["rows"] if row["placement"] in SHOWN]
    assert len({row["images"] for row in rows}) == 1, "numbers side by side are from the same images"
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        name = row["backbone"].split("_")[0]
        line = lines.setdefault((name, row["placement"]), {"model": f"{name}-ti", "placement": SHOWN[row["placement"]]})
        line[f"{row['tokens']} tokens"] = f"{row['top1']:.1f}"
    fewest = min(row["tokens"] for row in rows)
    for row in rows:
        if row["tokens"] == fewest and "GMACs" in row:
            lines[row["backbone"].split("_")[0], row["placement"]][f"GMACs at {fewest}"] = f"{row['GMACs']:.2f}"
    return report.markdown(list(lines.values())).rstrip()


def filled(page: str, docs: Path = DOCS) -> str:
    """The page with every block filled from its file under docs."""

    def fill(block: re.Match[str]) -> str:
        text = (docs / block[2]).read_text()
        return f"{block[1]}\n{accuracy(text) if block[2].endswith('.json') else table(text)}\n\n{block[3]}"

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
