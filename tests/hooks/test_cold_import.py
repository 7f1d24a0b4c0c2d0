"""Loading plugins starts nothing on a device and evaluates none of their properties (case 45)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str, *paths: Path) -> str:
    """Run code in a fresh interpreter that imports this checkout; return its output."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_plugins_loads_neither_pluggy_nor_metadata() -> None:
    code = (
        "import sys, dispatchkit.plugins\n"
        "print([m for m in ('pluggy', 'importlib.metadata', 'torch', 'numpy') if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_importing_dispatchkit_does_not_load_plugins() -> None:
    code = (
        "import sys, dispatchkit; print([m for m in sys.modules if 'plugin' in m or m == 'pluggy'])"
    )
    assert run(code) == "[]"


def test_listing_and_registering_load_no_torch_and_leave_a_forked_process_free(
    site: Any, policy_source: Any
) -> None:
    """Plugins are imported and listed without touching a device."""
    site.install("acme-rule", rule=policy_source("rule"))
    code = (
        "import os, sys\n"
        "from dispatchkit.plugins import load_plugins\n"
        "plugins = load_plugins(allow=['rule'], strict=True, environ={})\n"
        "plugins.describe(), list(plugins.backends), plugins.create_policy('rule')\n"
        "print('torch' in sys.modules, flush=True)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print(load_plugins(allow=['rule'], environ={}).policies['rule'].name, flush=True)\n"
        "    os._exit(0)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert run(code, site.folders[0]).split() == ["False", "rule", "0"]


# Reading any attribute except a hook's function runs code, which is recorded.
NOSY = """
    from dispatchkit.hookspecs import PolicySpec, hookimpl
    touched = []

    class Descriptor:
        def __get__(self, instance, owner):
            touched.append("descriptor")
            raise RuntimeError("a device was started")

    class Plugin:
        device = Descriptor()

        @property
        def stream(self):
            touched.append("property")
            raise RuntimeError("a device was started")

        def __getattr__(self, name):
            touched.append(name)
            raise AttributeError(name)

        def __eq__(self, other):
            touched.append("eq")
            raise RuntimeError

        __hash__ = None

        @hookimpl
        def dispatchkit_register_policies(self):
            return [PolicySpec("quiet", list)]

    plugin = Plugin()
"""


def test_no_property_of_a_plugin_is_run(site: Any) -> None:
    """Up to pluggy 1.6, registration alone would evaluate all properties."""
    site.install("acme-nosy", {"nosy": "nosy_rule:plugin"}, nosy_rule=NOSY)
    loaded = site.load(strict=True)
    loaded.describe()
    assert list(loaded.policies) == ["quiet"]
    assert sys.modules["nosy_rule"].touched == []


def test_factories_are_not_called_before_something_is_chosen(site: Any) -> None:
    site.install(
        "acme-later",
        later="""
        from dispatchkit.hookspecs import *
        calls = []
        @hookimpl
        def dispatchkit_register_backends():
            return [BackendSpec("later", lambda: calls.append(1))]
        """,
    )
    loaded = site.load(strict=True)
    assert "later" in loaded.backends
    assert sys.modules["later"].calls == []


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.6.0", "1.7.0"])
def test_all_of_this_holds_with_other_releases_of_pluggy(version: str, tmp_path: Path) -> None:
    """1.6 evaluates properties, keeps half of refused plugins and treats defaults differently."""
    target = tmp_path / "pluggy"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    done = subprocess.run(
        [*install, f"pluggy=={version}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"pluggy {version} cannot be fetched: {done.stderr.strip()[-200:]}")
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(target), str(ROOT)))}
    code = "import pluggy; print(pluggy.__version__)"
    shown = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == version
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(
        [*tests, str(Path(__file__).parent)],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
