"""Run benchmarks by name, all by default. Each is a module here with `run() -> list[dict]`, one dict a row."""

import sys
from importlib import import_module
from pathlib import Path

from spot import report
from spot.errors import unknown


def main(names: list[str]) -> None:
    known = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    for name in names or known:
        if name not in known:
            raise SystemExit(f"benchmarks: {unknown('benchmark', name, known)}")
        module = import_module(f"benchmarks.{name}")
        report.show(module.run(), title=(module.__doc__ or name).strip().splitlines()[0])


if __name__ == "__main__":
    main(sys.argv[1:])
