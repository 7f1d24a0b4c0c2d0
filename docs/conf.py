"""Sphinx configuration, used by `make docs`."""

import re
from importlib.metadata import version as _version
from pathlib import Path

project = "dispatchkit"
author = "The dispatchkit contributors"
copyright = author  # noqa: A001 - Sphinx reads this name
release = version = _version("dispatchkit")

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "requirements.txt"]
myst_heading_anchors = 3
myst_url_schemes = ["http", "https", "mailto"]

html_theme = "furo"
html_title = "dispatchkit"
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
pygments_dark_style = "github-dark"

# Pages are also read on the code host, so their links to files outside docs/ are relative paths.
# The built site does not contain these files.
_LINK_UP = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")


def _of_the_checkout(app, docname, source):
    """Replace each link to a file outside docs/ with the text of the link."""
    docs = Path(app.srcdir).resolve()
    folder = (docs / docname).parent

    def text_or_link(link):
        target = (folder / link[2]).resolve()
        is_elsewhere = target.exists() and not target.is_relative_to(docs)
        return link[1] if is_elsewhere else link[0]

    source[0] = _LINK_UP.sub(text_or_link, source[0])


def setup(app):
    """Register the link handler; Sphinx calls this function."""
    app.connect("source-read", _of_the_checkout)
