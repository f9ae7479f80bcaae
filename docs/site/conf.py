"""The documentation's site: `make docs` builds it from the pages where they lie, so that their links hold in both."""

from importlib.metadata import version as installed
from typing import Any

project = "Sharp"
author = "the authors of Sharp"
release = installed("sharp-attention")
extensions = [
    "myst_nb",  # myst_parser, and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
]
root_doc = "docs/index"
include_patterns = [
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/*.md",
    "bench/notes/*.md",
    "docs/**.md",
    "docs/notebooks/*.ipynb",
    "models/RESULTS.md",
    "tests/README.md",
]
exclude_patterns = [".venv", "build", ".editor", "docs/clients"]
html_theme = "furo"
html_title = f"Sharp {release}"
html_show_sourcelink = False
html_show_copyright = False
nb_execution_mode = "off"  # they are run by tests/full/docs/test_notebooks.py
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

FOLDERS = ("bench/notes/README", "docs/decisions/README", "docs/norms/README")  # pages that list their folder


def add_folder(_app: Any, page: str, source: list[str]) -> None:
    """Put the other pages of the folder below such a page; in the repository the lines would be seen as they are."""
    if page in FOLDERS:
        source[0] += "\n\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def setup(app: Any) -> None:
    """Register `add_folder` with Sphinx, which calls this function when it loads the configuration."""
    app.connect("source-read", add_folder)
