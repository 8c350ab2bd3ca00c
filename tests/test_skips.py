"""Nothing is skipped silently: every reason to skip a test is listed here, with what runs in its place anywhere.

`make test` prints the reasons of what was skipped (pytest -ra). Where ../shared is, only what needs an option or a
browser is skipped.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
SKIPS = {
    # Real weights and photographs: the same code runs on random ViTs, drawn images and written files in the same file.
    "the shared data is not here": "tests/conftest.py",
    # Blocks of guides that use real models: the other blocks run with the built-in one.
    "needs ../shared": "tests/test_guides.py",
    # The paper's tables, cell by cell: constants, which change only by hand.
    "the paper's source is not here": "tests/paper",
    # The contract compares with timm's ViT; the authors' windows have no timm ViT, and every other kind has one.
    "the authors' windows are not a ViT's patches": "tests/models/test_contract.py",
    # Formats that a build of Pillow lacks: the others of the same test.
    "Pillow cannot write ": "tests/data/test_picture.py",
    # Options of `make test ARGS=--all-models`: smaller models of the same families run always.
    "large: with --all-models": "tests/models/test_spot_vit.py",
    # Optional programs: the page's server and session are tested without a browser, tracing without ONNX.
    "no chromium is installed (apt-get install chromium), so the page is not tested in a browser": "tests/play",
    "datasets": "tests/data/test_shards.py",
    "zensical": "tests/tools/test_site.py",
    "IPython": "tests/test_notebooks.py",
    "onnxruntime": "tests",
    "onnx": "tests/placement/test_saliency.py",
    "onnxscript": "tests/models/test_tracing.py",
    "compiling takes half a minute; --all-models compiles": "tests/export/test_files.py",
    # A small file system needs the right to mount one: full disks are also tested by a limit on a file's size.
    "no tmpfs can be mounted here": "tests/faults",
}


def reasons(tree: ast.AST) -> list[str]:
    """What a file's skips say."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    said = []
    for call in calls:
        name = ast.unparse(call.func)
        if name.endswith(("pytest.skip", "mark.skipif", "mark.skip", "importorskip")):
            texts = [*call.args, *(word.value for word in call.keywords if word.arg == "reason")]
            parts = [each for text in reversed(texts) for each in ast.walk(text) if isinstance(each, ast.Constant)]
            said.append(str(parts[0].value) if parts else name)
    return said


def test_every_skip_is_known():
    for path in sorted(TESTS.rglob("*.py")):
        for reason in reasons(ast.parse(path.read_text())):
            assert reason in SKIPS, f"{path.name} skips because {reason!r}"
            assert str(path.relative_to(TESTS.parent)).startswith(SKIPS[reason])
