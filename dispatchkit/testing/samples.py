"""Compute a policy's decisions for sample batches, in this process or a new one.

The ranks of a job should make the same decisions, and so should a server after a restart. These are
separate processes, and the order of sets, or of objects sorted by address, can differ between
processes. This module requires neither hypothesis nor pytest.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from dispatchkit.dispatch import GraphView, Policy
from dispatchkit.errors import ConfigError
from dispatchkit.keys import Batch, CaptureSizeWarning, CUDAGraphMode, DispatchConfig, RuntimeMode
from dispatchkit.registry import GraphRegistry, KeyState

_CODE = "import dispatchkit.testing.samples as here; here.main()"
_BOTH_MODES = frozenset((RuntimeMode.PIECEWISE, RuntimeMode.FULL))


def graph_view(
    registry: GraphRegistry,
    config: DispatchConfig,
    *,
    modes: frozenset[RuntimeMode] = _BOTH_MODES,
    lazy: bool = False,
) -> GraphView:
    """Return a view of graphs like the one that a dispatcher passes to its policy.

    Args:
        registry: The registry of the keys and their graphs.
        config: The current configuration.
        modes: Runtime modes that the executor supports.
        lazy: Whether declared and evicted graphs may also be chosen.
    """
    ready = {KeyState.CAPTURED, *((KeyState.DECLARED, KeyState.EVICTED) if lazy else ())}
    return GraphView(registry, config, modes=modes, dispatchable=lambda entry: entry.state in ready)


def make_batch(
    config: DispatchConfig,
    num_tokens: int,
    *,
    num_reqs: int | None = None,
    uniform: int = 0,
    loras: int = 0,
    allowed: int = int(RuntimeMode.FULL),
) -> Batch:
    """Return the Batch that a dispatcher creates for these arguments of ``dispatch``."""
    is_uniform, query_len, max_query_len = config.query_class(uniform)
    return Batch(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        uniform=is_uniform,
        query_len=query_len,
        max_query_len=max_query_len,
        num_active_loras=loras,
        allowed=allowed,
    )


def usual_configs() -> Iterator[DispatchConfig]:
    """Yield one common configuration per mode except NONE, and one with adapters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)
        for mode in (
            CUDAGraphMode.FULL_AND_PIECEWISE,
            CUDAGraphMode.FULL,
            CUDAGraphMode.PIECEWISE,
            CUDAGraphMode.FULL_DECODE_ONLY,
        ):
            yield DispatchConfig(mode=mode, sizes=(1, 2, 4, 8, 16, 32))
        yield DispatchConfig(sizes=(4, 8, 16, 24), max_loras=2, query_lens=(2,))


def sample_answers(policy: Policy) -> list[str]:
    """Return a policy's keys and its decisions for about 1,200 fixed batches, as text."""
    answers: list[str] = []
    for config in usual_configs():
        try:
            keys = list(policy.declare(config))
        except ConfigError as error:
            answers.append(f"rejected: {error.setting}")
            continue
        answers.append(" | ".join(map(str, keys)))
        registry = GraphRegistry()
        registry.declare(keys)
        for index, key in enumerate(keys):
            if index % 5 != 3:  # omit some graphs, so that the order of keys matters
                registry.captured(key, object())
        view = graph_view(registry, config)
        for num_tokens in range(1, config.max_num_tokens + 1):
            for uniform in range(config.num_query_classes):
                for loras in range(config.max_loras + 1):
                    for allowed in (1, 2, 5):
                        batch = make_batch(
                            config, num_tokens, uniform=uniform, loras=loras, allowed=allowed
                        )
                        answers.append(f"{batch!r}: {policy.decide(batch, view)}")
    return answers


def sample_answers_elsewhere(policy: Policy, hash_seed: int) -> list[str]:
    """Return ``sample_answers`` of a policy from a new Python process.

    Args:
        policy: Policy that can be pickled, and whose class is importable or defined in a file.
        hash_seed: ``PYTHONHASHSEED`` of the other process.

    Raises:
        TypeError: The policy cannot be sent to another process.
        RuntimeError: The other process failed. The message contains the last lines of its stderr.
    """
    try:
        sent = pickle.dumps(policy)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"the policy cannot be pickled, so it cannot be tested in another process ({error})"
        ) from error
    if type(policy).__module__ == "__main__":  # importing a script would run it again
        raise TypeError(
            "the policy's class is defined in the main script, which other processes cannot "
            "import; move it to a module"
        )
    module = sys.modules[type(policy).__module__]
    source = inspect.getsourcefile(module) or ""
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        input=pickle.dumps((module.__name__, source, sent)),
        capture_output=True,
        check=False,
        env={
            **os.environ,
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError("the other process failed: " + " / ".join(last))
    answers: list[str] = pickle.loads(done.stdout)  # noqa: S301 - written by the child process
    return answers


def main() -> None:
    """Read a policy from standard input, and write its answers to standard output."""
    name, source, sent = pickle.load(sys.stdin.buffer)  # noqa: S301 - written by the parent process
    _import(name, source)
    policy: Any = pickle.loads(sent)  # noqa: S301 - written by the parent process
    answers = sample_answers(policy)
    sys.stdout.buffer.write(pickle.dumps(answers))


def _import(name: str, source: str) -> None:
    """Import a module by name, or from its file (test files often cannot be imported by name)."""
    try:
        importlib.import_module(name)
        return
    except ModuleNotFoundError:
        if not source:
            raise
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise ImportError(f"Cannot import {name!r} from {source!r}: it is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
