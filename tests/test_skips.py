"""Nothing is skipped silently: every reason to skip a test is listed here, with what runs in its place anywhere.

`make test` prints the reasons of what was skipped (pytest -ra). Where ../shared is, only what needs an option or a
browser is skipped.
"""

import ast
from pathlib import Path

SKIPS = {
    # Real weights and photographs: the same code runs on random ViTs, drawn images and written files in the same file.
    "the shared data is not here",
    # Blocks of guides that use real models: the other blocks run with the built-in one.
    "needs ../shared",
    # The paper's tables, cell by cell: constants, which change only by hand.
    "the paper's source is not here",
    # The contract compares with timm's ViT; the authors' windows have no timm ViT, and every other kind has one.
    "the authors' windows are not a ViT's patches",
    # Options of `make test ARGS=--all-models`: smaller models of the same families run always.
    "large: with --all-models",
    # Optional programs: the page's server and session are tested without a browser, tracing without ONNX.
    "no chromium is installed (apt-get install chromium), so the page is not tested in a browser",
    "datasets",
    "zensical",
    "IPython",
    "onnxruntime",
    "onnx",
    "onnxscript",
    # A small file system needs the right to mount one: full disks are also tested by a limit on a file's size.
    "no tmpfs can be mounted here",
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


def test_every_skip_is_listed_and_every_listed_one_is_there():
    paths = Path(__file__).parent.rglob("*.py")
    assert {reason for path in paths for reason in reasons(ast.parse(path.read_text()))} == SKIPS
