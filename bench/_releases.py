"""Decide one batch with the dispatchers of published vLLM releases.

``make rivals`` fetches the dispatchers. They run unchanged, with a stand-in for the configuration
that they read. The loader is shared with the tests of the vLLM plugin.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

RELEASES = ("0.33.0", "0.13.0", "0.11.0")
_LOADER = (
    Path(__file__).resolve().parent.parent / "plugins" / "dispatchkit-vllm" / "tests" / "rivals.py"
)


def _loader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_release_loader", _LOADER)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{_LOADER} is missing; run this script from a checkout.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _config(module: ModuleType, padding: Sequence[int], sizes: Sequence[int]) -> Any:
    compilation = SimpleNamespace(
        cudagraph_mode=module.CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=list(sizes),
        max_cudagraph_capture_size=max(sizes),
        bs_to_padded_graph_size=list(padding),
        cudagraph_specialize_lora=True,
        compile_sizes=None,
        is_attention_compiled_piecewise=lambda: True,
        pass_config=SimpleNamespace(enable_sp=False),
        uniform_cudagraph_capture_sizes=[],
        mode=None,
        level=None,
        splitting_ops=None,
    )
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        speculative_config=None,
        num_speculative_tokens=0,
        lora_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        pad_for_cudagraph=lambda num_tokens: padding[num_tokens],
    )


def calls(
    padding: Sequence[int], sizes: Sequence[int], num_tokens: int, *, uniform: bool
) -> Iterator[tuple[str, Callable[[], Any] | None]]:
    """Yield each release with a function that decides one batch; None if not fetched.

    The dispatcher of release 0.11 expects its caller to create a padded descriptor for each batch.
    The function for this release therefore also creates the descriptor.
    """
    loader = _loader()
    for release in RELEASES:
        if not loader.is_fetched(release):
            yield release, None
            continue
        with loader.loaded(release) as module:
            config = _config(module, padding, sizes)
            dispatcher = module.CudagraphDispatcher(config)
            dispatcher.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, 1)
            descriptor = module.BatchDescriptor
        if release == "0.11.0":
            yield (
                release,
                _with_descriptor(dispatcher.dispatch, descriptor, config, num_tokens, uniform),
            )
        else:
            yield release, _plain(dispatcher.dispatch, num_tokens, uniform)


def _plain(dispatch: Callable[..., Any], num_tokens: int, uniform: bool) -> Callable[[], Any]:
    return lambda: dispatch(num_tokens, uniform, False)


def _with_descriptor(
    dispatch: Callable[..., Any], descriptor: Any, config: Any, num_tokens: int, uniform: bool
) -> Callable[[], Any]:
    pad = config.pad_for_cudagraph
    return lambda: dispatch(descriptor(num_tokens=pad(num_tokens), uniform_decode=uniform))
