"""How Sphinx builds the pages; `make docs` runs it."""

from importlib.metadata import version as _version
from pathlib import Path

project = "dispatchkit"
author = "The dispatchkit contributors"
copyright = author  # noqa: A001 - Sphinx's own name for it
release = version = _version("dispatchkit")

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "requirements.txt"]
myst_heading_anchors = 3
# Pages are read on the code host too, so they link files of the checkout as they lie there.
myst_url_schemes = ["http", "https", "mailto"]

html_theme = "furo"
html_title = "dispatchkit"
html_show_copyright = False
html_show_sphinx = False


def _of_the_checkout(app, env, node, contnode):
    """A link to what lies in the checkout but is no page: here its text alone is left."""
    page = Path(app.srcdir, node.get("refdoc", "index")).parent
    return contnode if (page / node.get("reftarget", "")).exists() else None


def setup(app):
    """Called by Sphinx."""
    app.connect("missing-reference", _of_the_checkout)
