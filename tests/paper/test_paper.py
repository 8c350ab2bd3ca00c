r"""The paper's numbers are the paper's, cell by cell: table, row, column and sign.

A table of the LaTeX source is read as lines of (section, words, numbers): a line without numbers opens a
section.
"""

import re

import pytest

from paper import classification, elastic, off_grid, priors, robustness, saliency_gain, speed, tome, transfer
from tests.paper.test_studies import PAPER

Line = tuple[str, str, list[float]]


def lines(source: str, label: str) -> list[Line]:
    """The lines of the table with this label."""
    start = source.index(rf"\label{{{label}}}")
    table = re.search(r"\\begin\{(tabular|tblr)\}(.*?)\\end\{\1\}", source[start:], re.DOTALL).group(2)
    read, section = [], ""
    for line in re.split(r"\\\\", table.partition(r"\midrule")[2]):
        line = re.sub(r"\\phantom\{[^}]*\}+|\\textcolor\{[^}]*\}|\\SetCell\[[^]]*\]|\{[lcr]\}", "", line)
        down = line.replace(r"$\downarrow$\,", "-").replace("- ", "-")
        numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+|e-\d+)(?![\d.])", down)]
        words = " ".join(re.findall(r"[A-Za-z][\w/-]*", re.sub(r"\\[a-z]+|\d+\.\d+|\d+e-\d+", " ", line)))
        if numbers:
            read.append((section, words, numbers))
        elif words:
            section = words
    return read


def study_lines() -> dict[str, list[Line]]:
    """The same of the numbers that the studies hold, by the paper's label."""
    names = {classification.DROPOUT: "ViT-B/16 Patch Grid", classification.ORACLE: "ON-B/16 Isotropic"}
    made = {
        "tab:imgcls": [
            (backbone, names.get(line, f"B/16 {line.title()}"), [number for pair in pairs for number in pair])
            for backbone, placements in classification.PAPER.items()
            for line, pairs in placements.items()
        ],
        "tab:grid_prior": [
            (backbone, prior.title(), [knn, *([] if std is None else [std]), top1, gain])
            for backbone, own in priors.PAPER.items()
            for prior, (knn, std, top1, gain) in own.items()
        ],
        "tab:spot_on_saliency": [("", backbone, list(values)) for backbone, values in saliency_gain.PAPER.items()],
        "tab:transfer": [
            ("", f"{source} {target}", [original, moved, round(moved - original, 2)])
            for source, target, moved in transfer.PAPER
            for original in [classification.PAPER_ISOTROPIC[target]]
        ],
        "tab:ablations": [
            ("", backbone, [number for top1, drop in harms for number in (top1, -drop)])
            for backbone, harms in robustness.PAPER.items()
        ],
        "tab:tome": [
            (backbone, "ToMe" if "ToMe" in method else "", [fast, change])
            for backbone, method, _, fast, change in tome.PAPER
        ],
        "tab:elasticvit": [
            ("", "MAE-IN1k" if line == elastic.SPOT else "ElasticViT", list(values))
            for line, values in elastic.PAPER.items()
        ],
        "tab:throughput": [
            ("", name, [speeds[place] for speeds in speed.SPEED.values()]) for place, name in enumerate(("ViT", "SPoT"))
        ],
    }
    sections = {off_grid.PRIOR: "", off_grid.GRID: "Grid", off_grid.SUBPIXEL: "Subpixel"}
    made["tab:off_grid_vs_grid"] = [
        (sections[row["placement"]], "ON" if "lr" in row else "", [*([row["lr"]] if "lr" in row else []), row["top1"]])
        for row in off_grid.PAPER
    ]
    return made


def difference(paper: list[Line], ours: list[Line]) -> str:
    """The first line that differs, or nothing."""
    if len(paper) != len(ours):
        return f"{len(paper)} lines and {len(ours)}"
    for (section, words, numbers), (own_section, own_words, own) in zip(paper, ours, strict=True):
        own_words = own_words.removesuffix("-Authors")  # the paper's center is ours of that name
        if own_section not in section or own_words not in words or numbers != own:
            return f"{section} {words} {numbers} and {own_section} {own_words} {own}"
    return ""


LABELS = sorted(study_lines())


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's source is not here")
@pytest.mark.parametrize("label", LABELS)
def test_every_cell_is_the_papers(label):
    assert difference(lines(PAPER.read_text(), label), study_lines()[label]) == ""
