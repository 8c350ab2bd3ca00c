"""Print the oldest versions that pyproject.toml allows, as constraints for pip."""

import re
import tomllib
from pathlib import Path


def constraints(project: str) -> list[str]:
    """name==version for each dependency of the project file's text that has a lower bound."""
    wanted = tomllib.loads(project)["project"]["dependencies"]
    return [f"{match[1]}=={match[2]}" for each in wanted if (match := re.fullmatch(r"([\w.-]+)>=([\w.]+)", each))]


if __name__ == "__main__":
    print("\n".join(constraints((Path(__file__).parents[1] / "pyproject.toml").read_text())))
