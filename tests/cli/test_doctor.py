"""``doctor``: each finding has a level, a reason and, if useful, a next step."""

from __future__ import annotations

import json
import os
import platform
import sys
import types
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dispatchkit.cli import facts
from dispatchkit.cli.doctor import Finding, Level, _devices, _self_check, examine
from dispatchkit.errors import BackendUnavailableError
from dispatchkit.hookspecs import BackendSpec, hookimpl
from dispatchkit.plugins import PluginSet, load_plugins
from dispatchkit.settings import Settings


def found(plugins: PluginSet, environ: Mapping[str, str] | None = None) -> dict[str, Finding]:
    return {one.about: one for one in examine(plugins, environ or {})}


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)


def test_without_torch_it_says_what_still_works_and_what_to_install(no_torch: None) -> None:
    """Decisions need no torch; captures do."""
    findings = found(load_plugins())
    assert findings["torch"].level is Level.PROBLEM
    assert "simulations work without" in findings["torch"].message
    assert "dispatchkit[torch]" in findings["torch"].next_step
    assert "backend tape" not in findings


def test_a_missing_default_policy_is_a_problem(no_torch: None, monkeypatch: Any) -> None:
    """Without it, nothing works by default; a blocked plugin needs no installation."""
    blocked = found(load_plugins(allow=[]))["default policy"]
    assert blocked.level is Level.PROBLEM
    assert "installed, but not loaded" in blocked.message
    assert "`dispatchkit plugins`" in blocked.next_step
    monkeypatch.setattr(facts, "version_of", lambda *names: None)
    missing = found(load_plugins(allow=[]))["default policy"]
    assert missing.level is Level.PROBLEM
    assert "pip install dispatchkit-vllm" in missing.next_step


def test_a_broken_plugin_is_a_problem_with_a_way_out(no_torch: None) -> None:
    """The user can repair it or block it by the variable."""
    findings = found(load_plugins(extra=[("bad", object)]))
    assert findings["plugin bad"].level is Level.PROBLEM
    assert "DISPATCHKIT_DISABLE=bad" in findings["plugin bad"].next_step


def test_a_blocked_plugin_is_a_note(no_torch: None) -> None:
    assert found(load_plugins(block=["vllm"]))["plugin vllm"].level is Level.NOTE


def test_torch_and_tape_are_looked_at_and_checked() -> None:
    """A real capture is replayed with another input, and the results are compared."""
    torch = pytest.importorskip("torch")
    findings = found(load_plugins())
    assert torch.__version__ in findings["torch"].message
    assert findings["backend tape"].level is Level.OK
    assert (
        "50 small kernels were captured and replayed correctly" in findings["backend tape"].message
    )


def test_a_backend_that_replays_wrongly_is_a_problem() -> None:
    """The check compares results instead of only running."""
    torch = pytest.importorskip("torch")
    from dispatchkit.backends.tape import TapeBackend

    class Forgetful(TapeBackend):
        def capture(self, run: Any, **options: Any) -> Any:
            value = run()
            return types.SimpleNamespace(outputs=value, replay=lambda: None, release=lambda: None)

    @hookimpl
    def dispatchkit_register_backends() -> list[BackendSpec]:
        return [BackendSpec("tape", Forgetful)]

    plugin = types.SimpleNamespace(dispatchkit_register_backends=dispatchkit_register_backends)
    findings = found(load_plugins(extra=[("mine", plugin)], replace=["tape"]))
    assert findings["backend tape"].level is Level.PROBLEM
    assert "small kernels differ" in findings["backend tape"].message
    assert torch is not None


def test_a_backend_that_cannot_run_is_a_problem_in_its_own_words() -> None:
    """The finding quotes the message of its exception."""
    pytest.importorskip("torch")

    @hookimpl
    def dispatchkit_register_backends() -> list[BackendSpec]:
        def make() -> Any:
            raise BackendUnavailableError("No tape today. Next: buy one.")

        return [BackendSpec("tape", make)]

    plugin = types.SimpleNamespace(dispatchkit_register_backends=dispatchkit_register_backends)
    findings = found(load_plugins(extra=[("mine", plugin)], replace=["tape"]))
    assert findings["backend tape"].level is Level.PROBLEM
    assert "No tape today" in findings["backend tape"].message


@pytest.mark.parametrize(
    ("environ", "about", "level"),
    [
        ({"VLLM_PLUGINS": "mine", "DISPATCHKIT_POLICY": "vllm"}, "VLLM_PLUGINS", Level.PROBLEM),
        ({"VLLM_PLUGINS": "", "DISPATCHKIT_TRACE": "a.csv"}, "VLLM_PLUGINS", Level.PROBLEM),
        ({"VLLM_PLUGINS": "mine"}, "VLLM_PLUGINS", Level.NOTE),
        ({"VLLM_PLUGINS": "mine,dispatchkit", "DISPATCHKIT_POLICY": "vllm"}, "vLLM", Level.OK),
        ({}, "vLLM", Level.OK),
    ],
)
def test_a_vllm_that_leaves_dispatchkit_out_is_named(
    environ: dict[str, str], about: str, level: Level, no_torch: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(facts, "version_of", lambda *names: "0.32.0")
    assert found(load_plugins(), environ)[about].level is level
    monkeypatch.setattr(facts, "version_of", lambda *names: None)
    assert "vLLM" not in found(load_plugins(), environ)


@pytest.mark.parametrize(
    ("environ", "level", "effect"),
    [
        ({}, Level.NOTE, "without dispatchkit-vllm."),
        ({"DISPATCHKIT_POLICY": "vllm"}, Level.PROBLEM, "so DISPATCHKIT_POLICY has no effect."),
        (
            {"DISPATCHKIT_POLICY": "vllm", "DISPATCHKIT_TRACE": "a.csv"},
            Level.PROBLEM,
            "so DISPATCHKIT_POLICY and DISPATCHKIT_TRACE have no effect.",
        ),
    ],
)
def test_vllm_without_the_plugin_is_named(
    environ: dict[str, str], level: Level, effect: str, no_torch: None, monkeypatch: Any
) -> None:
    installed = {"vllm": "0.32.0"}
    monkeypatch.setattr(facts, "version_of", lambda *names: installed.get(names[0]))
    finding = found(load_plugins(), environ)["vLLM"]
    assert finding.level is level
    assert finding.message.endswith(effect)
    assert finding.next_step == "pip install dispatchkit-vllm."


def test_hidden_devices_are_shown_again_by_the_next_step(monkeypatch: Any) -> None:
    """The driver is not at fault if the variable hides every device."""
    torch = types.SimpleNamespace(
        version=types.SimpleNamespace(cuda="13.0"),
        cuda=types.SimpleNamespace(is_available=lambda: False),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (finding,) = _devices(torch)
    assert "nvidia-smi" in finding.next_step
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = _devices(torch)
    assert "hides every device" in finding.message
    assert finding.next_step.startswith("unset CUDA_VISIBLE_DEVICES")


@pytest.mark.slow_except("PYTORCH_NO_CUDA_MEMORY_CACHING-problem")
@pytest.mark.parametrize(
    ("variable", "level"),
    [
        ("CUDA_LAUNCH_BLOCKING", Level.SLOW),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", Level.PROBLEM),
    ],
)
def test_variables_that_slow_or_break_captures_are_named(variable: str, level: Level) -> None:
    """Only variables that are set are reported."""
    pytest.importorskip("torch")
    plugins = load_plugins()
    assert found(plugins, {variable: "1"})[variable].level is level
    assert variable not in found(plugins, {variable: "0"})


def test_json_and_text_tell_the_same(run: Any) -> None:
    """Exit code 0 unless something is broken; slow is not broken."""
    done = run("doctor", "--json")
    report = json.loads(done.out)
    assert report["ok"] is (done.code == 0)
    levels = {one["about"]: one["level"] for one in report["findings"]}
    text = run("doctor")
    assert text.code == done.code
    assert all(f"{level:<8}{about}" in text.out for about, level in levels.items())
    assert max(map(len, text.out.splitlines())) <= 80


def test_a_report_holds_what_is_asked_of_whoever_reports_a_fault(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contains system, versions and settings with their sources, but not the user's folder."""
    home = Path(sys.executable).parent
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DISPATCHKIT_MAX_NUM_SEQS", "64")
    report = json.loads(run("doctor", "--json").out)
    says = {one["about"]: one["message"] for one in report["findings"]}
    assert f"{platform.system()} {platform.release()}" in says["dispatchkit"]
    assert f"(~{os.sep}" in says["dispatchkit"]
    assert f"pluggy {version('pluggy')}" in says["libraries"]
    assert "max_num_seqs = 64 (the environment variable " in says["settings"]
    assert facts.given_settings(Settings()) == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n", "535.104.05"),
        ("something new\n", "something new"),
        ("", ""),
        (None, ""),
    ],
)
def test_the_driver_is_read_where_the_kernel_tells_it(
    tmp_path: Path, text: str | None, told: str
) -> None:
    """This works if torch finds no device too."""
    path = tmp_path / "version"
    if text is not None:
        path.write_text(text)
    assert facts.driver(path) == told


def test_a_problem_is_found_wanting(run: Any, plugins_with: Any) -> None:
    plugins_with(bad=object)
    done = run("doctor", "--json")
    assert done.code == 1
    assert json.loads(done.out)["ok"] is False


def test_a_device_that_raises_is_a_finding_and_no_traceback() -> None:
    """A broken driver makes torch raise; the command must report that."""

    class Broken:
        torch_device = "cpu"
        warmup = capture = new_pool = None

        def device_info(self) -> dict[str, str]:
            raise RuntimeError("CUDA error: unknown error")

    broken = types.SimpleNamespace(create_backend=lambda name: Broken())
    (finding,) = _self_check(broken, "cuda", {})  # type: ignore[arg-type]
    assert finding.level is Level.PROBLEM
    assert "RuntimeError: CUDA error: unknown error" in finding.message
