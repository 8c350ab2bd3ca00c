"""Every command and code block in README.md and docs/*.md runs as printed, with small limits.

A block is a fence with a language. `sh`: lines that begin with `spot` or `python -m paper` are run; the target of
`make` must be in the Makefile. `python`: the blocks of a page are run in order, in one namespace that begins with
`torch`, `images`, `labels` and `positions`. Others are for reading only.

A comment on the line before a fence says what a block needs, and is not shown on the page:

    <!-- guide: needs ../shared -->       real weights and photographs: run only where they are
    <!-- guide: needs ../shared and the blocks above -->    and what the page's commands before it have written
    <!-- guide: not run, WHY -->          only checked: verbs and options exist

Commands run in a folder where the names that guides use exist: photo.jpg, dog.jpg and cat.jpg (a photograph where
../shared has one, or else a scene), holiday/, imagenet/, images/ and photos/ (scenes), u2netp.onnx, and so on; MODEL,
OTHER_MODEL, TIMM_NAME and DIR mean a built-in model and a data folder. Real models have their weights where ../shared
has them, and else new ones. LIMITS are added to every command, so that it ends soon. A command that has run, on this
page or another, does not run again.
"""

import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_pil_image

from paper.__main__ import main as paper
from spot.cli import main
from spot.commands import VERBS
from spot.data.scenes import Scenes
from spot.models import checkpoints
from spot.models.spot_vit import adapt
from tests.conftest import SHARED, options_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- guide: (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```", re.M | re.S)
MARKS = ("needs ../shared", "not run, ")
TRAIN = {"limit": ["8"], "val-limit": ["8"], "set": ["batch_size=4", "epochs=1", "warmup_epochs=0"]}
LIMITS = {
    "demo": {"scenes": ["32"], "tokens": ["9"]},
    "evaluate": {"limit": ["8"], "workers": ["0"]},
    "search": {"limit": ["8"], "workers": ["0"], "steps": ["1"]},
    "saliency": {"limit": ["8"]},
    "learn": {"limit": ["8"], "epochs": ["1"]},
    "calibrate": {"workers": ["0"]},
    "bench": {"rounds": ["1"], "batch-size": ["1"], "tokens": ["9"]},
    "retrofit": TRAIN, "pretrain": TRAIN, "finetune": TRAIN,
}  # fmt: skip
PAPER = ["--model", "scenes-a", "--limit", "32", "--oracle-limit", "32", "--bank-limit", "32", "--seeds", "1"]
WORDS = {"MODEL": "scenes-a", "OTHER_MODEL": "scenes-b", "TIMM_NAME": "vit_tiny_patch16_224", "DIR": "images"}
LONG = ["all"]  # minutes even with limits: only checked
SERVING = "play"  # until Ctrl-C: only checked


def blocks(page):
    for match in BLOCK.finditer(page.read_text()):
        line = page.read_text()[: match.start("language")].count("\n") + 1
        yield line, match["language"], match["code"], match["mark"] or ""


def commands(code):
    """The lines of a shell block, comments and continuations taken away, as lists of words."""
    lines = re.sub(r"\\\n\s*", " ", code).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [each[: each.index(">")] if ">" in each else each for each in words if each]


CASES = [
    pytest.param(page, line, code, mark, id=f"{page.name}:{line}")
    for page in PAGES
    for line, language, code, mark in blocks(page)
    if language == "sh"
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A folder with what guides name: class folders of scenes, a photograph, a saliency network."""
    folder = tmp_path_factory.mktemp("stage")
    for index in range(64):
        image, label, _ = Scenes("test", 64)[index]
        for split in ("val", "train"):
            file = folder / "imagenet" / split / f"{label}" / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            to_pil_image(image).resize((128, 96)).save(file)
    shutil.copytree(folder / "imagenet" / "val", folder / "images")
    for split in ("train", "val"):
        for number, name in enumerate(("ant", "bee", "cat", "dog")):
            shutil.copytree(folder / "imagenet" / "val" / f"{number}", folder / "photos" / split / name)
    shutil.copytree(folder / "imagenet" / "val" / "0", folder / "holiday")
    (folder / "docs").symlink_to(ROOT / "docs")
    photograph = Image.open(next((folder / "holiday").iterdir()))
    if SHARED.is_dir():
        photograph = Image.open(next((SHARED / "imagenet-val-2k" / "n02099601").glob("*.jpg")))
        (folder / "u2netp.onnx").symlink_to(SHARED / "weights" / "u2netp.onnx")
    for name in ("photo.jpg", "dog.jpg", "cat.jpg"):
        photograph.convert("RGB").save(folder / name)
    return folder


@pytest.fixture(scope="module")
def ran(stage):
    """The commands that have run on this stage."""
    return set()


@pytest.fixture
def here(stage, monkeypatch):
    """That folder, with weights for every timm name: those of ../shared, or new ones."""
    load_timm = checkpoints.load_timm

    def offline(name, weights, options):
        file = SHARED / "weights" / f"{name}.safetensors"
        if weights is None and file.is_file():
            return load_timm(name, file, options)
        if weights is None:
            small = {"depth": 2} if "base" in name else {}
            return adapt(name, **small, **options).eval()
        return load_timm(name, weights, options)

    monkeypatch.setattr("spot.models.family.load_timm", offline)
    monkeypatch.setattr("spot.models.loading.load_timm", offline)
    monkeypatch.chdir(stage)
    return stage


def with_limits(words):
    """A printed command with placeholders filled in and its verb's limits, where it does not say its own."""
    verb, *rest = [WORDS.get(word, word) for word in words[1:]]
    if "--limit" in rest:
        value = rest.index("--limit") + 1
        rest[value] = str(min(int(rest[value]), 64))
    for option, values in LIMITS.get(verb, {}).items():
        if f"--{option}" not in rest and not (option == "limit" and "--data" not in rest):
            rest += [f"--{option}", *values]
    return [verb, *rest]


def above(page, line):
    """The page's commands before a line, of blocks that run."""
    return "".join(code for at, language, code, mark in blocks(page)
                   if at < line and language == "sh" and mark.startswith("needs"))  # fmt: skip


def run_once(words, ran):
    """Run a command, unless it has run on this stage: what it wrote is still there."""
    if tuple(words) not in ran:
        main(with_limits(words))
        ran.add(tuple(words))


@pytest.mark.parametrize("page, line, code, mark", CASES)
def test_every_command_runs_as_printed(page, line, code, mark, here, ran):
    if mark.startswith("needs ../shared") and not SHARED.is_dir():
        pytest.skip("needs ../shared")
    for words in commands(above(page, line) + code if mark.endswith("above") else code):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), words
        elif words[0] == "spot" and (mark.startswith("not run") or words[1] == SERVING):
            assert words[1] in VERBS, words
            assert {word for word in words if word.startswith("--")} <= options_of(words[1]), words
        elif words[0] == "spot":
            run_once(words, ran)
        elif words[:3] == ["python", "-m", "paper"]:
            if words[3] not in LONG and not mark.startswith("not run"):
                paper([*words[3:], *PAPER])
        elif words[:2] == ["python", "-m"]:
            assert find_spec(words[2]), words
        else:
            assert mark.startswith("not run"), f"{page.name}:{line}: {words[0]} is not run; mark the block"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_runs_as_printed(page, here, ran):
    torch.manual_seed(0)
    names = {"torch": torch, "images": torch.rand(2, 3, 224, 224), "labels": torch.tensor([1, 2])}
    names["positions"] = torch.rand(2, 25, 2)
    for line, language, code, mark in blocks(page):
        needs_shared = mark.startswith("needs ../shared") and not SHARED.is_dir()
        if language == "python" and not mark.startswith("not run") and not needs_shared:
            for words in commands(above(page, line)) if mark.endswith("above") else ():
                run_once(words, ran)
            exec(compile("\n" * line + code, str(page), "exec"), names)
    if losses := names.get("losses"):  # of a training loop: they fall
        quarter = len(losses) // 4
        assert sum(losses[-quarter:]) < sum(losses[:quarter]) / 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page):
    for line, language, code, mark in blocks(page):
        assert not mark or mark.startswith(MARKS), f"{page.name}:{line}: {mark}"
        if language not in ("sh", "python"):
            assert not re.search(r"^(spot [a-z]|import spot)", code, re.M), f"{page.name}:{line} would not be run"
