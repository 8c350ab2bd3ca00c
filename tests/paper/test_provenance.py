"""A number in a document is of the files that ship."""

import json
import re
from pathlib import Path

import pytest
import torch

from paper import findings
from paper.provenance import comment, file_hashes, hashes_with_base
from paper.study import STUDIES, Result, find_study
from spot.models.shipped import ALIASES, built_in
from spot.store import read_tensors, write_tensors
from tests.conftest import make_nano

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(RESULTS.rglob("*.json"))


USES_POLICY = ("learned", "merged-learned", "policy")  # in the names of rows that use a policy

# Documents. A table is copied from a result (tools/fill_results.py), or a comment above it names its files:
#     <!-- of: vit-ti file 1f384a4d10ae4cb3 policy 80fc4d2598b0e9ed, deit-ti base 39292d92f61fd31d -->
# or explains why it is not about shipped files:
#     <!-- of no shipped file: training runs of the recipe, one seed each -->
BLOCK = re.compile(r"<!-- (?:accuracy: )?\S+\.(?:md|json)(?: [^>]*)?-->.*?<!-- end -->", re.DOTALL)
NAMED = re.compile(r"<!-- of: (.+?) -->")
REASON = re.compile(r"<!-- of no shipped file: \w.+? -->")
# A row in which two cells begin with a number that has decimals:
NUMBERS = re.compile(r"^(?:.*\|)?\s*[-+−]?\d+\.\d[^|\n]*\|(?:.*\|)?\s*[-+−]?\d+\.\d", re.MULTILINE)


def unproven(text):
    """Sentences on tables of measured numbers in a document that name no files, or files that are not shipped."""
    text = BLOCK.sub("", text)
    for named in NAMED.finditer(text):
        for model in named[1].split(","):
            name, *pairs = model.split()
            ships = hashes_with_base(name)
            for part, given in zip(pairs[::2], pairs[1::2], strict=True):
                if ships.get(part) != given:
                    yield f"a table is of {name}'s {part} {given}; what ships has {ships.get(part)}"
    for table in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
        above = text[: table.start()].rstrip().splitlines()[-3:]
        if NUMBERS.search(table[0]) and not any(NAMED.search(line) or REASON.search(line) for line in above):
            yield f"a table of numbers names no model files: {table[0].splitlines()[0]}"


def stale(settings, rows):
    """Sentences on why a result does not match the shipped files; none if it does."""
    learned = any(word in str(value) for row in rows for value in row.values() for word in USES_POLICY)
    for name, about in settings.get("models", {}).items():
        source = ALIASES.get(about["source"], about["source"])
        if source not in built_in():
            continue
        for part, needed in file_hashes(source).items():
            if about.get(part) != needed and (part == "file" or learned):
                yield f"{name}: measured with {part} {about.get(part)}, what ships has {needed}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_result_is_of_the_model_files_that_ship(path):
    content = json.loads(path.read_text())
    settings = content["settings"]
    several = [settings] if "models" in settings else [each for each in settings.values() if isinstance(each, dict)]
    named = [each for each in several if each.get("models")]
    assert named, f"{path} does not say which model files it is of"
    text = path.with_suffix(".md").read_text()
    for each in named:
        assert all("source" in about for about in each["models"].values())
        assert list(stale(each, content["rows"])) == []
        assert path.stem == "findings" or all(about.get("file", "") in text for about in each["models"].values())


@pytest.mark.parametrize("path", [path for path in PAGES if path.stem in STUDIES], ids=lambda path: path.stem)
def test_a_studys_page_is_made_from_its_result(path):
    assert find_study(path.stem).markdown(Result.load(path)) == path.with_suffix(".md").read_text()


@pytest.mark.parametrize("folder", ["imagenet", "scenes"])
def test_the_page_of_findings_is_made_from_the_results_beside_it(folder):
    assert findings.markdown(findings.read(RESULTS / folder)) == (RESULTS / folder / "findings.md").read_text()


DOCUMENTS = [
    *(RESULTS.parents[1] / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(RESULTS.parent.glob("*.md")),
    *(path for path in sorted(RESULTS.rglob("*.md")) if path.with_suffix(".json") not in PAGES),
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_table_of_numbers_is_copied_from_a_result_or_names_its_files(path):
    assert list(unproven(path.read_text())) == []


@pytest.mark.parametrize(
    "card", sorted((RESULTS.parents[1] / "spot" / "assets").glob("*.md")), ids=lambda path: path.stem
)
def test_a_card_names_the_files_that_its_accuracies_are_of(card):
    text = card.read_text()
    shown = [name for name in built_in() if f"| {name} |" in text]
    named = [each.split()[0] for each in NAMED.search(text)[1].split(",")]
    assert sorted(named) == sorted(shown) and shown
    assert [each for each in unproven(text) if "what ships has" in each] == []


def test_a_table_without_files_or_with_others_is_found():
    table = "| a | b |\n| --- | --- |\n| 1.5 | 2.5 |\n"
    file = file_hashes("vit-ti")["file"]
    assert "names no model files: | a | b |" in next(unproven(f"text\n\n{table}"))
    assert not list(unproven(f"text\n\n<!-- of: vit-ti file {file} -->\n\n{table}"))
    assert not list(unproven(f"{comment({'vit-ti': 'vit-ti'})}\n\n{table}"))
    assert "what ships has" in next(unproven(f"<!-- of: vit-ti file {'0' * 16} -->\n\n{table}"))
    assert not list(unproven(f"<!-- of no shipped file: times only -->\n\n{table}"))
    assert list(unproven(f"<!-- of no shipped file: -->\n\n{table}"))  # without a reason
    assert not list(unproven(f"<!-- results/scenes/a.md -->\n\n{table}\n<!-- end -->\n"))
    assert not list(unproven("| step | what |\n| --- | --- |\n| 1 | look |\n"))


def test_a_hash_is_of_weights_and_changes_with_one_number_and_with_nothing_else(tmp_path):
    make_nano().save_pretrained(tmp_path / "a")
    model = make_nano()
    model.save_pretrained(tmp_path / "b")
    assert file_hashes(tmp_path / "a") == file_hashes(tmp_path / "b")
    state = read_tensors(tmp_path / "a" / "model.safetensors")[0]
    write_tensors(tmp_path / "other.safetensors", state, "elsewhere", {"said": "differently"})
    assert file_hashes(tmp_path / "other.safetensors") == file_hashes(tmp_path / "a")
    with torch.no_grad():
        model.vit.cls_token[0, 0, 0] += 1e-3
    model.save_pretrained(tmp_path / "c")
    assert file_hashes(tmp_path / "c") != file_hashes(tmp_path / "a")
    assert file_hashes("vit_tiny_patch16_224") == {}
