"""The layers of the tests: fast, slow, GPU."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_marks_are_in_the_files_that_are_collected() -> None:
    """A file without ``mark.slow`` is not imported for the slow layer; GPU tests likewise."""
    helpers = [
        path
        for folder in ("tests", "plugins/*/tests", "examples/*/tests")
        for path in ROOT.glob(f"{folder}/**/*.py")
        if not path.name.startswith("test_")
    ]
    assert helpers
    texts = {path: path.read_text(encoding="utf-8") for path in helpers}
    marked = [
        str(path) for path, text in texts.items() if "mark.slow" in text or "mark.gpu" in text
    ]
    assert marked == []
