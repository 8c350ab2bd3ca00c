"""README.md for a package index, which has no files beside it: links and images become addresses of the repository.

python -m tools.index_readme https://github.com/OWNER/REPOSITORY v0.2.0 > README.md
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)(\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\])\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(text: str, repository: str, version: str) -> str:
    """The text with every relative link an address: images as files, pages as the repository shows them."""

    def address(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        label = LINK.sub(address, label)
        kind = "raw" if image else "blob"
        return f"{image}{label}({repository.rstrip('/')}/{kind}/{version}/{target})"

    return LINK.sub(address, text)


if __name__ == "__main__":
    print(absolute((Path(__file__).parents[1] / "README.md").read_text(), *sys.argv[1:3]), end="")
