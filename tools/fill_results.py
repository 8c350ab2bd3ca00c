"""Copy the tables of studies into the pages that show them: `python -m tools.fill_results`.

The text between `<!-- results/scenes/off-grid.md -->` and `<!-- end -->` is the table of that file, which
`python -m paper off-grid --out docs/results/scenes` wrote. With `<!-- results/scenes/off-grid.md rows: prior, grid -->`
only rows that have one of these cells are copied; with `without: prior, grid` all other rows. If a cell has a comma in
it, semicolons separate the cells. Between `<!-- accuracy: results/….json -->` and `<!-- end -->` is the accuracy by
placement and budget, of rows measured on the same images. Run this after a study; no number there is typed by hand.
"""

import json
import re
from pathlib import Path

from spot import report

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", DOCS / "RESULTS.md", DOCS / "quickstart.md", DOCS / "large-pictures.md")
BLOCK = re.compile(
    r"(<!-- (?:accuracy: )?((?:results|\.\./spot/assets)/\S+\.(?:md|json))(?: (rows|without): (.+?))? -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
# The rows of an accuracy table: a placement as studies call it, and as the page does.
SHOWN = {
    "ViT, patch dropout": "random patches, not retrofitted",
    "ViT, smaller image": "a smaller image, not retrofitted",
    "patch dropout, SPoT's weights": "random patches",
    "smaller image, SPoT's weights": "a smaller image",
    "isotropic": "`isotropic`",
    "center-authors": "`center-authors`",
    "learned": "`learned`",
}


def table(page: str, cells: str | None = None, *, without: bool = False) -> str:
    """The first table of a study's page, or its rows that have, or do not have, one of these cells."""
    lines = page.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rest = [number for number in range(first, len(lines)) if not lines[number].startswith("|")]
    head, rows = lines[first : first + 2], lines[first + 2 : min(rest, default=len(lines))]
    if cells is not None:
        wanted = {cell.strip() for cell in cells.split(";" if ";" in cells else ",")}
        found = {cell.strip() for row in rows for cell in row.split("|")}
        assert wanted <= found, f"no row has the cell {wanted - found}"
        rows = [row for row in rows if without != bool(wanted & {cell.strip() for cell in row.split("|")})]
    return "\n".join([*head, *rows])


def accuracy(result: str) -> str:
    """Top-1 by placement and budget from a study's JSON, and the cost of the smallest with its map.

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
        rows = accuracy(text) if block[2].endswith(".json") else table(text, block[4], without=block[3] == "without")
        return f"{block[1]}\n{rows}\n\n{block[5]}"

    return BLOCK.sub(fill, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
