"""Imports between the rooms of the package point one way: down.

A room is a sub-package of `spot` or a module beside them. It may import itself and what stands on a lower
floor, wherever in a file the import is written; imports for type checkers alone do not count. `paper` and
`tools` stand beside the package: they import it, never the reverse.
`python -m tests.test_imports` prints the graph.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import spot

PACKAGE = Path(spot.__file__).parent
FLOORS = (
    {"errors", "processes", "draws", "hashes"},
    {"store"},
    {"report"},
    {"tokens"},  # of images and positions, know no models
    {"data"},
    {"plots"},  # take tables and tensors
    {"placement", "options"},  # options: imports nothing heavy
    {"models"},
    {"timm"},  # the models' names in timm
    {"evaluation"},
    {"export"},  # times what it writes with evaluation
    {"training"},  # validates with evaluation
    {"spot"},  # the public names, of rooms below
    {"play", "demo"},
    {"assets", "commands"},  # assets: until its programs have moved to tools/
    {"cli"},
    {"__main__"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The modules of this package that a file imports, with line numbers: `spot`, `spot.data.picture`, ..."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written in full"
            for alias in node.names:  # from spot import report: a module; from spot import load: a name of another's
                home = spot._HOMES.get(alias.name, f"spot.{alias.name}")
                yield node.lineno, home if node.module == "spot" else str(node.module)
        yield from imports(node)


def arrows() -> dict[tuple[str, str], list[str]]:
    """Every (room, imported room) with the places it is imported at."""
    graph: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        room = "spot" if inside == Path("__init__.py") else inside.parts[0].removesuffix(".py")
        for line, module in imports(ast.parse(path.read_text())):
            parts = module.split(".")
            if parts[0] == "spot" and parts[1:] != ["__version__"]:
                graph[room, parts[1] if len(parts) > 1 else "spot"].append(f"spot/{inside}:{line}")
    for name, home in spot._HOMES.items():  # loaded on first use, so not written as imports
        graph["spot", home.split(".")[1]].append(f"spot/__init__.py: {name}")
    return {arrow: places for arrow, places in graph.items() if arrow[0] != arrow[1]}


def test_every_room_has_a_floor():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert rooms - {"__init__"} <= set(FLOOR)


def test_every_import_points_down():
    wrong = {f"{a} -> {b}": places for (a, b), places in arrows().items() if FLOOR[b] >= FLOOR[a]}
    assert not wrong


def test_spot_does_not_import_paper_or_tools():
    modules = {module for path in PACKAGE.rglob("*.py") for _, module in imports(ast.parse(path.read_text()))}
    assert not {module for module in modules if module.split(".")[0] in ("paper", "tools", "tests")}


def test_no_command_imports_from_another():
    for path in sorted((PACKAGE / "commands").glob("*.py")):
        modules = {module for _, module in imports(ast.parse(path.read_text()))}
        assert not {module for module in modules if module.startswith("spot.commands.")}, path


@pytest.mark.parametrize(
    "code, expected",
    [
        ("import torch, spot.data.picture", ["torch", "spot.data.picture"]),
        ("from spot.errors import InputError", ["spot.errors"]),
        ("from spot import report, load", ["spot.report", "spot.models.loading"]),
        ("def late():\n    if True:\n        from spot.models import tome", ["spot.models"]),
        ("if TYPE_CHECKING:\n    from spot.models import tome\nelse:\n    import spot", []),
    ],
)
def test_an_import_counts_wherever_it_is_written(code, expected):
    assert [module for _, module in imports(ast.parse(code))] == expected


if __name__ == "__main__":
    for room in sorted({arrow[0] for arrow in arrows()}, key=lambda name: FLOOR.get(name, len(FLOORS))):
        below = sorted(target for source, target in arrows() if source == room)
        print(f"{room:12} -> {', '.join(below)}")
