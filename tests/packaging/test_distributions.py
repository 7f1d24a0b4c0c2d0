"""Each plugin is its own distribution, included in the set-up, and uses only public names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
each_plugin = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)


def package_of(plugin: Path) -> str:
    """Return the import name of a plugin."""
    return plugin.name.replace("-", "_")


def project_of(plugin: Path) -> dict[str, object]:
    """Return the [project] table of a plugin."""
    return tomllib.loads((plugin / "pyproject.toml").read_text())["project"]


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Yield each import of dispatchkit: line, module, and name (None for `import x`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield node.lineno, node.module, alias.name


def breaches(source: str) -> list[str]:
    """Return the private names that a plugin's module imports from dispatchkit."""
    found = []
    for line, module, name in imports_of(ast.parse(source)):
        parts = module.split(".")
        if parts[0] != "dispatchkit":
            continue
        if any(part.startswith("_") for part in parts) or (name and name.startswith("_")):
            found.append(f"line {line}: {module} {name or ''} is private")
        elif len(parts) > 2:
            found.append(f"line {line}: {module} is inside a room; import from the room itself")
        elif name is not None and not _is_public(module, name):
            found.append(f"line {line}: {name} is not a public name of {module}")
    return found


def _is_public(module: str, name: str) -> bool:
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name and missing.name.partition(".")[0] == "dispatchkit":
            raise
        return True  # the extra is not installed here; checked where it is
    if name in getattr(loaded, "__all__", vars(loaded)):
        return True
    # A package imported as `from dispatchkit import keys`.
    return module == "dispatchkit" and importlib.util.find_spec(f"dispatchkit.{name}") is not None


def test_there_are_plugins() -> None:
    """The parametrised tests below would pass without any plugin."""
    assert "dispatchkit-vllm" in [plugin.name for plugin in PLUGINS]


@each_plugin
def test_development_set_up_installs_the_plugin(plugin: Path) -> None:
    """A plugin missing from the single resolver run would be searched on a package index."""
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    pattern = re.compile(rf"-e \.?/?plugins/{re.escape(plugin.name)}(\[[\w,-]+\])?")
    assert [line for line in lines if pattern.fullmatch(line.strip())], plugin.name


def test_products_are_extras_of_the_core_and_all_takes_each() -> None:
    """The pages install plugins by `pip install 'dispatchkit[ranks]'`."""
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = core["optional-dependencies"]
    products = {"compile", "plan", "ranks", "transformers"}
    assert {plugin.name.removeprefix("dispatchkit-") for plugin in PLUGINS} >= products
    for product in products:
        assert extras[product] == [f"dispatchkit-{product}>=0.1"]
    (everything,) = extras["all"]
    assert set(re.findall(r"[\w-]+", everything.partition("[")[2])) == set(extras) - {"all"}


@each_plugin
def test_import_contracts_cover_the_plugin(plugin: Path) -> None:
    """Contracts check only the root packages."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert package_of(plugin) in config["tool"]["importlinter"]["root_packages"]


@each_plugin
def test_plugin_is_named_by_one_word(plugin: Path) -> None:
    """Distribution dispatchkit-x, package dispatchkit_x and entry point x can be guessed."""
    project = project_of(plugin)
    word = plugin.name.removeprefix("dispatchkit-")
    assert project["name"] == plugin.name
    assert (plugin / "src" / package_of(plugin) / "__init__.py").is_file()
    entries = project.get("entry-points", {}).get("dispatchkit", {})
    if (plugin / "src" / package_of(plugin) / "plugin.py").exists():
        assert entries[word].partition(":")[0].split(".")[0] == package_of(plugin)
    else:
        assert entries == {}  # registers nothing; users import it


@each_plugin
def test_plugin_carries_licence_readme_and_its_need_of_the_core(plugin: Path) -> None:
    """It is published alone, so it needs all of these."""
    project = project_of(plugin)
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert any(re.match(r"dispatchkit\b(?!-)", need) for need in project["dependencies"])
    assert (plugin / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (plugin / project["readme"]).read_text().startswith(f"# {plugin.name}")


@each_plugin
def test_plugin_names_its_page_which_is_in_its_section_of_the_docs(plugin: Path) -> None:
    """Package and page link to each other."""
    index = (ROOT / "docs" / "index.md").read_text()
    section = re.search(
        rf":caption: {re.escape(plugin.name)}\n:maxdepth: 1\n\n(.*?)```", index, re.DOTALL
    )
    assert section is not None
    pages = {f"{page}.md" for page in section[1].split()}
    readme = (plugin / "README.md").read_text()
    linked = set(re.findall(r"\]\(\.\./\.\./docs/([^)#]+)", readme))
    assert pages & linked
    assert all((ROOT / "docs" / page).is_file() for page in pages | linked)


@each_plugin
def test_plugin_uses_public_names_only(plugin: Path) -> None:
    """A plugin that needs a private name shows a gap in the public interface."""
    found = {
        str(path.relative_to(plugin)): problems
        for path in sorted((plugin / "src").rglob("*.py"))
        if (problems := breaches(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "folder", sorted(ROOT.glob("examples/*/src")), ids=lambda path: path.parent.name
)
def test_examples_of_distributions_use_public_names_only(folder: Path) -> None:
    """Users copy the examples."""
    found = {path.name: breaches(path.read_text()) for path in folder.rglob("*.py")}
    assert found
    assert {name: problems for name, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import dispatchkit._secret",
        "from dispatchkit import _secret",
        "from dispatchkit._secret import name",
        "from dispatchkit.keys._modes import name",
        "from dispatchkit.keys.modes import CUDAGraphMode",
        "def f():\n    from dispatchkit import _lazy",
        "from dispatchkit.errors import nothing_of_that_name",
    ],
)
def test_the_check_of_public_names_finds_a_breach(source: str) -> None:
    """The check itself must detect a breach."""
    assert len(breaches(source)) == 1


def test_the_check_of_public_names_lets_public_ones_pass() -> None:
    """Plugins may use public packages and the package itself."""
    assert breaches("import dispatchkit\nfrom dispatchkit.errors import ConfigError\n") == []


def test_the_table_of_distributions_is_what_they_bring() -> None:
    """A wrong distribution in a message would mislead its reader."""
    from dispatchkit import load_plugins
    from dispatchkit.distributions import DISTRIBUTIONS, distribution_of, load_attribute

    loaded = load_plugins(environ={})
    brought = {
        "policy": loaded.policies,
        "lane policy": loaded.lane_policies,
        "observer": loaded.observers,
        "command": loaded.commands,
    }
    for kind, known in brought.items():
        for name, distribution in DISTRIBUTIONS[kind].items():
            assert known[name].origin.distribution == distribution, name
        for name, one in known.items():
            distribution = one.origin.distribution
            if distribution in {plugin.name for plugin in PLUGINS}:
                assert distribution_of(kind, name) == distribution, name
    own = {one.origin.distribution for one in loaded.commands.values()}
    assert own <= set(DISTRIBUTIONS["command"].values())  # includes all
    for name in DISTRIBUTIONS["attribute"]:
        assert load_attribute(name) is not None


def load_release() -> ModuleType:
    """Return the script that builds and tests releases."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    return release


@pytest.mark.parametrize(
    ("quick", "slow", "runs", "passed"),
    [(0, 1, 1, True), (5, 0, 2, True), (5, 1, 2, False), (5, 5, 2, False), (1, 0, 1, False)],
)
def test_a_release_runs_the_slow_tests_of_what_has_no_others(
    quick: int, slow: int, runs: int, passed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pytest's exit code 5 (no test selected) does not count as success."""
    release, marks = load_release(), []

    def run(name: str, python: Path, folder: Path, which: str) -> int:
        marks.append(which)
        return slow if len(marks) > 1 else quick

    monkeypatch.setattr(release, "run_tests", run)
    assert release.passes("dispatchkit-x", tmp_path, tmp_path) is passed
    assert marks == ["not slow and not gpu", "not gpu"][:runs]


def test_all_distributions_have_one_version_and_the_changelog_names_it() -> None:
    """A release starts from these."""
    release = load_release()
    assert set(release.SOURCES) == {"dispatchkit", *(plugin.name for plugin in PLUGINS)}
    assert release.versions_disagree() == ""
    assert release.main(["dispatchkit-no"]) == 2
