"""The guides and the API reference as a site: `make docs`, or `python -m tools.site FOLDER`.

The generator is Zensical, by the authors of Material for MkDocs, whose last major version is at its end as
MkDocs 1.x is: Zensical reads the same Markdown, is maintained, needs no JavaScript to build, and takes API pages
from mkdocstrings, which reads docstrings without importing the package.

Pages keep their places in the repository, so that a link that works in the repository works on the site.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import spot

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "CITATION.cff", "spot/assets/*.md")
GUIDES = {
    "Start": ("README.md",),
    "Guides": (
        "docs/quickstart.md", "docs/placement.md", "docs/large-pictures.md", "docs/training.md", "docs/evaluation.md",
        "docs/early-exit.md", "docs/deployment.md", "docs/playground.md", "docs/reproducing.md",
    ),
    "Results": ("docs/RESULTS.md", "spot/assets/RETROFITS.md", "spot/assets/README.md"),
    "Reference": ("docs/api.md", "docs/architecture.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
}  # fmt: skip
MODULES = {  # beside the public names: what a guide mentions by its module
    "Tokens": ("spot.tokens.windows", "spot.tokens.pyramid", "spot.tokens.position_embedding"),
    "Placement": (
        "spot.placement.priors",
        "spot.placement.saliency",
        "spot.placement.oracle",
        "spot.placement.policy",
        "spot.placement.files",
    ),
    "Models": (
        "spot.models.spot_vit",
        "spot.models.checkpoints",
        "spot.models.wrappers",
        "spot.models.family",
        "spot.models.cascade",
        "spot.models.dense",
    ),
    "Data": ("spot.data.images", "spot.data.loader", "spot.data.picture", "spot.data.scenes"),
    "Training": ("spot.training.recipes", "spot.training.objectives"),
    "Evaluation": ("spot.evaluation.accuracy", "spot.evaluation.knn", "spot.evaluation.cost"),
    "Export": ("spot.export.files", "spot.export.runtime"),
}
SETTINGS = """[project]
site_name = "SPoT"
site_description = "Vision Transformers whose tokens can be placed anywhere in an image"
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
nav = [
{nav}
]

[project.theme]
features = ["content.code.copy", "navigation.sections", "navigation.top", "search.highlight"]

[project.plugins.mkdocstrings.handlers.python]
paths = ["{root}"]

[project.plugins.mkdocstrings.handlers.python.options]
docstring_style = "google"
docstring_options = {{ warn_unknown_params = false, warn_missing_types = false }}
show_root_heading = true
show_source = false
members_order = "source"
filters = ["!^_"]
heading_level = 3
"""


def api_page() -> str:
    """Markdown that asks mkdocstrings for the public names, then for the modules."""
    parts = ["# API reference", "From the docstrings. The names of the first section are in `spot` itself.", "## spot"]
    parts += [f"::: {home}.{name}" for name, home in spot._HOMES.items()]
    for title, modules in MODULES.items():
        parts += [f"## {title}", *(f"::: {module}" for module in modules)]
    return "\n\n".join(parts) + "\n"


def stage(folder: Path) -> None:
    """Copy pages and pictures to folder/pages, and write the settings beside them."""
    copied = folder / "pages"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(ROOT / "docs", copied / "docs")
    for pattern in PAGES:
        for file in ROOT.glob(pattern):
            target = copied / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    for listed in (copied / "docs" / "notebooks", *(copied / "docs" / "results").iterdir()):
        files = (f"- [{file.name}]({file.name})" for file in sorted(listed.iterdir()))
        (listed / "index.md").write_text(f"# {listed.name.capitalize()}\n\n" + "\n".join(files) + "\n")
    (copied / "docs" / "api.md").write_text(api_page())
    listed = [page for pages in GUIDES.values() for page in pages]
    others = [f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md")) if f"docs/{file.name}" not in listed]
    menu = {**GUIDES, "Guides": [*GUIDES["Guides"], *others]}
    sections = (f'  {{ "{title}" = {json.dumps(list(pages))} }},' for title, pages in menu.items())
    (folder / "zensical.toml").write_text(SETTINGS.format(nav="\n".join(sections), root=ROOT))


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0] if arguments else "build/docs")
    folder.mkdir(parents=True, exist_ok=True)
    stage(folder)
    command = [sys.executable, "-m", "zensical", "build", "--clean"]
    subprocess.run(command, cwd=folder, check=True)
    print(f"The site begins at {folder / 'site' / 'index.html'}")


if __name__ == "__main__":
    main(sys.argv[1:])
