"""Compare a dispatcher of vLLM with its facade and with the policy ``vllm``.

Used by ``release.py``, with the sources of a release first on ``sys.path``.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["DISPATCHKIT_POLICY"] = "vllm"

from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from dispatchkit_vllm.engine import first
from dispatchkit_vllm.facade import dispatcher_for

MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "NONE")
SIZES = (1, 2, 4, 8, 16)


def config(mode: str, query_len: int, max_loras: int) -> Any:
    """Return a configuration with the attributes that the dispatchers read."""
    sizes = [size * query_len for size in SIZES]
    table = [next(size for size in sizes if size >= count) for count in range(sizes[-1] + 1)]
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=sizes[-1],
            cudagraph_mode=CUDAGraphMode[mode],
            is_attention_compiled_piecewise=lambda: True,
            bs_to_padded_graph_size=[0, *table[1:]],
            compile_sizes=None,
            cudagraph_specialize_lora=True,
        ),
        pad_for_cudagraph=lambda count: table[count] if count else 0,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        num_speculative_tokens=query_len - 1,
        speculative_config=(
            SimpleNamespace(num_speculative_tokens=query_len - 1) if query_len > 1 else None
        ),
        lora_config=(
            SimpleNamespace(max_loras=max_loras, specialize_active_lora=True) if max_loras else None
        ),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1, rank=0),
        device_config=SimpleNamespace(device_type="cpu"),
        additional_config={},
    )


def answer(dispatcher: Any, facts: dict[str, Any]) -> Any:
    """Return a dispatcher's result for one call; if a policy decides, open a step first."""
    if hasattr(dispatcher, "controller"):
        dispatcher.controller.open()
    try:
        return dispatcher.dispatch(**facts)
    except AssertionError:
        return "AssertionError"


def questions(max_loras: int) -> list[dict[str, Any]]:
    """Return the arguments of all calls, with the names that this release accepts."""
    takes = inspect.signature(CudagraphDispatcher.dispatch).parameters
    full = {CUDAGraphMode.FULL}
    found = []
    for tokens, uniform, loras, limited in itertools.product(
        range(1, 40), (False, True), range(max_loras + 1), (False, True)
    ):
        facts: dict[str, Any] = {
            "num_tokens": tokens,
            "uniform_decode": uniform,
            "has_lora": loras > 0,
        }
        if "num_active_loras" in takes:
            facts["num_active_loras"] = loras
        if "invalid_modes" in takes:
            facts["invalid_modes"] = full if limited else None
        else:
            facts["disable_full" if "disable_full" in takes else "use_cascade_attn"] = limited
        found.append(facts)
    return found


def is_known_difference(release: str, mode: str, query_len: int, facts: dict[str, Any]) -> bool:
    """Return whether a release is known to differ from its facade for a call.

    In mode FULL, 0.17 runs uniform decode with several tokens per request eager. The facade and all
    other releases replay a FULL graph, which serves any batch.
    """
    is_affected = mode == "FULL" and query_len > 1 and facts["uniform_decode"]
    return bool(release.startswith("0.17.") and is_affected)


def ask_all(release: str) -> tuple[int, int]:
    """Compare all results; return the number of calls and the number of differences.

    Prints the first five differences.
    """
    asked = differing = 0
    kinds = (
        CudagraphDispatcher,
        dispatcher_for(CudagraphDispatcher),
        first.dispatcher_class(CudagraphDispatcher),
    )
    for mode, query_len, max_loras in itertools.product(MODES, (1, 2), (0, 3)):
        made = [kind(config(mode, query_len, max_loras)) for kind in kinds]
        for one in made:
            one.initialize_cudagraph_keys(CUDAGraphMode[mode], query_len)
        for facts in questions(max_loras):
            answers = [answer(one, facts) for one in made]
            own, facade, policy = answers
            asked += 1
            if own != policy or (
                own != facade and not is_known_difference(release, mode, query_len, facts)
            ):
                differing += 1
                if differing <= 5:
                    sys.stdout.write(f"{mode} {query_len} {facts}: {answers}\n")
    return asked, differing
