"""On a package index the README's images and links have addresses."""

import re

from tools.index_readme import absolute
from tools.site import ROOT


def test_images_links_and_a_linked_image():
    text = "![a](x/y.png) [b](docs/b.md#c) [![p](i.png)](p.md) [t](https://t.org) [h](#here)"
    at = "https://github.com/o/r"
    assert absolute(text, at + "/", "v1") == (
        f"![a]({at}/raw/v1/x/y.png) [b]({at}/blob/v1/docs/b.md#c) "
        f"[![p]({at}/raw/v1/i.png)]({at}/blob/v1/p.md) [t](https://t.org) [h](#here)"
    )


def test_the_readme_has_no_relative_link_left():
    made = absolute((ROOT / "README.md").read_text(), "https://github.com/o/r", "v1")
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", made)
    assert "https://github.com/o/r/raw/v1/docs/images/photograph.png" in made
