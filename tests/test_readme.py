"""The README keeps its word: the tree is whole, its links lead somewhere, its commands exist."""

import re
from pathlib import Path

from spot.cli import VERBS
from tools.fill_results import filled

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_tree_names_every_module():
    tree = README[README.index("## The tree") :]
    missing = [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "spot").rglob("*.py"))
        if path.stem not in ("__init__", "__main__") and path.stem not in tree
    ]
    assert not missing


def test_links_and_pictures_exist():
    local = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert local
    assert not [link for link in local if not (ROOT / link).exists()]


def test_commands_are_verbs():
    verbs = set(re.findall(r"^spot (\w+)", README, flags=re.MULTILINE)) | set(re.findall(r"`spot (\w+)", README))
    assert verbs
    assert verbs <= set(VERBS)


def test_the_ten_lines_run(nano):
    """The README's example, on a small model."""
    import torch

    import spot

    code = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)[1]
    code = re.sub(r"model = spot\.load\(.*\n", "\n", code)
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    names = {"model": nano, "images": images, "labels": labels, "spot": spot, "torch": torch}
    exec(code, names)
    assert names["found"].positions.shape == (2, 25, 2)
    assert names["logits"].shape == (2, 10)


def test_the_tables_of_the_results_are_those_the_studies_wrote():
    page = (ROOT / "docs" / "RESULTS.md").read_text()
    assert page.count("<!-- results/") == page.count("<!-- end -->") > 3
    assert filled(page) == page
