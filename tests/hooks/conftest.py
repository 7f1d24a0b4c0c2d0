"""Fake distributions on sys.path, for the real importlib.metadata."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatchkit import plugins


class Site:
    """A folder of installed distributions, and a loader that ignores all other plugins."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder]

    def folder(self, name: str, *, first: bool = False) -> Path:
        """Add another folder to the path."""
        path = self.folders[0].parent / name
        path.mkdir(exist_ok=True)
        self.folders.insert(0 if first else len(self.folders), path)
        return path

    def install(
        self,
        distribution: str,
        points: dict[str, str] | str | None = None,
        version: str = "1.0",
        group: str = "dispatchkit",
        folder: Path | None = None,
        **modules: str,
    ) -> None:
        """Write a dist-info with entry points, and modules with the given source."""
        folder = folder or self.folders[0]
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        if points is None:
            points = {name: name for name in modules}
        if isinstance(points, dict):
            lines = "".join(f"{name} = {value}\n" for name, value in points.items())
            points = f"[{group}]\n{lines}"
        (info / "entry_points.txt").write_text(points)
        for name, source in modules.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(source))

    def load(self, *, environ: dict[str, str] | None = None, **options: Any) -> plugins.PluginSet:
        """Load plugins from these folders only."""
        importlib.invalidate_caches()
        before = list(sys.path)
        others = [one for one in before if not list(Path(one).glob("dispatchkit*-info"))]
        sys.path[:] = [*map(str, self.folders), *others]
        try:
            return plugins.load_plugins(environ=environ or {}, **options)
        finally:
            sys.path[:] = before


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Yield an empty site; remove modules imported from it afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    known = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# A plugin with one policy, whose name is inserted.
POLICY = """
    from dispatchkit.hookspecs import PolicySpec, hookimpl

    class Rule:
        def __init__(self, *, step=8):
            self.step = step
        def declare(self, config):
            return []
        def decide(self, batch, graphs):
            return None

    @hookimpl
    def dispatchkit_register_policies():
        return [PolicySpec("{name}", Rule, summary="made for tests")]
"""


@pytest.fixture
def policy_source() -> Any:
    """Return a function from a policy's name to the source of a plugin with that policy."""
    return lambda name: textwrap.dedent(POLICY).replace("{name}", name)


@pytest.fixture
def row() -> Any:
    """Return a function that finds the single row of a plugin in a set's description."""

    def find(loaded: plugins.PluginSet, name: str) -> plugins.PluginInfo:
        (found,) = [one for one in loaded.describe() if one.name == name]
        return found

    return find
