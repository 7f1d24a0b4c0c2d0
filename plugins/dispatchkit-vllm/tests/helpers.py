"""Configurations with the attributes that the facades read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dispatchkit.keys import CUDAGraphMode, padding_table


def vllm_config(
    sizes: Any = (1, 2, 4, 8), *, mode: str = "FULL_AND_PIECEWISE", **facts: Any
) -> Any:
    sizes = list(sizes)
    query_len = facts.get("query_len", 1)
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.parse(facts.get("config_mode", mode)),
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=max(sizes, default=0),
        bs_to_padded_graph_size=list(padding_table(sizes)),
        cudagraph_specialize_lora=facts.get("specialize_lora", True),
        compile_sizes=facts.get("compile_sizes"),
        is_attention_compiled_piecewise=lambda: facts.get("piecewise", True),
        pass_config=SimpleNamespace(enable_sp=facts.get("sequence_parallel", False)),
        uniform_cudagraph_capture_sizes=facts.get("uniform_sizes", []),
    )
    max_loras = facts.get("max_loras", 0)
    lora = SimpleNamespace(
        max_loras=max_loras, specialize_active_lora=facts.get("specialize_active_lora", False)
    )
    return SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=facts.get("max_num_seqs", 8)),
        speculative_config=(
            SimpleNamespace(num_speculative_tokens=query_len - 1) if query_len > 1 else None
        ),
        num_speculative_tokens=query_len - 1,
        lora_config=lora if max_loras else None,
        parallel_config=SimpleNamespace(tensor_parallel_size=facts.get("tp", 1)),
    )


def initialized(module: Any, config: Any, mode: str = "FULL_AND_PIECEWISE", **options: Any) -> Any:
    dispatcher = module.CudagraphDispatcher(config, **options)
    query_len = 1 + config.num_speculative_tokens
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode[mode], query_len)
    return dispatcher
