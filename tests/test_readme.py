"""The README and the guides keep their word: code runs, tables are what studies wrote, links lead somewhere."""

import re
from pathlib import Path

import pytest

import spot
from spot.cli import VERBS
from spot.placement.policy import Policy
from tests.conftest import DEIT_TINY, make_nano
from tests.test_imports import FLOORS
from tools.fill_results import PAGES, filled

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "images" / "photos" / "README.md"]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_links_and_pictures_exist(guide):
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", guide.read_text()) if "://" not in link]
    assert not [link for link in links if link and not (guide.parent / link).exists()]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_commands_are_verbs(guide):
    text = guide.read_text()
    verbs = set(re.findall(r"^spot ([a-z]+)", text, flags=re.MULTILINE)) | set(re.findall(r"`spot ([a-z]+)", text))
    assert verbs <= set(VERBS)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


def run_ten_lines(monkeypatch, load):
    """The README's code as it is printed; only where weights come from is ours."""
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(spot, "load", load)
    names = {}
    exec(code, names)
    assert len([line for line in code.splitlines() if line]) == 10
    columns = 2 if names["model"].scale is None else 3
    assert names["positions"].shape == names["result"].positions.shape == (1, 25, columns)
    assert names["logits"].shape == (1, 1000)
    return names


def test_the_ten_lines_run_as_printed(monkeypatch, capsys, shared_data):
    original, weights = spot.load, shared_data / "weights" / f"{DEIT_TINY}.safetensors"
    names = run_ten_lines(monkeypatch, lambda name, **options: original(name, weights=weights, **options))
    said = re.search(r"print\(.*\)  # (.*)", README)[1]
    assert capsys.readouterr().out.strip().split(",")[0] == said == "espresso"
    assert len(names["model"].grid()) == 196


def test_the_ten_lines_run_without_any_download(monkeypatch, capsys):
    """The same on a random ViT of 16 tokens and an untrained policy, anywhere."""
    model = make_nano(num_classes=1000)
    model.policy = Policy(model.patch_size, side=8)
    run_ten_lines(monkeypatch, lambda name, **options: model.at(**options))
    assert capsys.readouterr().out.strip() in model.class_names


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_tables_are_those_that_studies_wrote(page):
    text = page.read_text()
    assert len(re.findall(r"<!-- (accuracy: )?(results|\.\./spot/assets)/", text)) == text.count("<!-- end -->") > 0
    assert filled(text) == text


def test_what_the_readme_says_of_its_table_is_so():
    cells = [line.split("|")[1:-1] for line in README.splitlines() if re.match(r"\| (vit|deit)_tiny", line)]
    assert len(cells) == 4 and "the same 2,000 ImageNet validation images" in README
    assert {row[-1].strip() for row in cells} == {"2000"}
    for plain, retrofitted in (cells[:2], cells[2:]):
        assert retrofitted[0].strip() == f"{plain[0].strip()}+spot"
        assert retrofitted[4] == plain[4]  # with all patches: timm's ViT again


def test_the_architecture_names_every_folder_and_its_place():
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn = page[page.index("## How imports point") :]
    rooms = [path for path in (ROOT / "spot").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    names = {path.stem for path in rooms} - {"__init__", "__main__"}
    order = [
        {room.split(" ")[0] for room in line.split(", ")} for line in drawn.split("```")[1].splitlines() if line.strip()
    ]
    assert set().union(*order) - {"spot"} == names - {"assets"}
    assert order == [floor & (names | {"spot"}) - {"assets"} for floor in FLOORS if floor & (names | {"spot"})]
    assert not [path.name for path in rooms if path.is_dir() and f"\n  {path.name}/ " not in page]
