"""The site is built by one command, and its links lead somewhere."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tools import site


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.add(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("docs")
    site.main([str(folder)])
    return folder / "site"


def test_every_link_of_the_site_leads_to_a_page_and_a_heading(built):
    pages = {path: Page(path) for path in built.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(built)}: {link}")
    assert len(pages) > 20
    assert not broken


def test_every_guide_is_a_page_in_the_menu(built):
    menu = (built.parent / "zensical.toml").read_text()
    guides = [path.relative_to(site.ROOT).as_posix() for path in (site.ROOT / "docs").glob("*.md")]
    for page in (*guides, *(page for pages in site.GUIDES.values() for page in pages)):
        assert menu.count(f'"{page}"') == 1, page
        name = "index.html" if page == "README.md" else page.replace("README.md", "index.md").replace(".md", ".html")
        assert (built / name).is_file(), name
