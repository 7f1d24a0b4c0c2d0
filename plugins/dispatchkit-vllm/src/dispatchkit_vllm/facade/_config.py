"""Read values from a vLLM configuration, or any object with the same attributes.

The attributes differ between releases; each function supports all releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatchkit.keys import CUDAGraphMode


def mode_of(vllm_config: Any) -> CUDAGraphMode:
    """Return the configured mode; NONE by default."""
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    return CUDAGraphMode.NONE if mode is None else CUDAGraphMode.parse(mode)


def capture_sizes(vllm_config: Any) -> list[int]:
    """Return the capture sizes, in the order of the configuration."""
    return list(getattr(vllm_config.compilation_config, "cudagraph_capture_sizes", None) or ())


def max_size_name(vllm_config: Any) -> str:
    """Return the name of the compilation setting for the largest capture size."""
    old = "max_capture_size"
    return old if hasattr(vllm_config.compilation_config, old) else "max_cudagraph_capture_size"


def max_num_seqs(vllm_config: Any) -> int:
    """Return the maximum number of requests of a batch."""
    return int(vllm_config.scheduler_config.max_num_seqs)


def query_len(vllm_config: Any) -> int:
    """Return the query length of uniform decode batches: 1 plus the number of drafts."""
    speculative = getattr(vllm_config, "speculative_config", None)
    count = getattr(speculative, "num_speculative_tokens", None)
    if count is None and (
        speculative is not None or not hasattr(vllm_config, "speculative_config")
    ):
        # In the newest releases, the number of speculative tokens is an attribute of
        # ``vllm_config`` itself.
        count = getattr(vllm_config, "num_speculative_tokens", None)
    return 1 + int(count or 0)


def decode_query_lens(vllm_config: Any, longest: int) -> tuple[int, ...]:
    """Return the query lengths of uniform decode batches, ascending.

    Dynamic speculative decoding uses several query lengths.

    Args:
        vllm_config: vLLM's configuration, or any object with the same attributes.
        longest: Query length with all speculative tokens.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    is_dynamic = getattr(speculative, "uses_dynamic_speculative_decoding", None)
    most = int(getattr(vllm_config, "num_speculative_tokens", 0) or 0)
    if is_dynamic is None or not is_dynamic() or longest <= most:
        return (longest,)
    schedule = sorted(speculative.num_speculative_tokens_per_batch_size)  # type: ignore[union-attr]
    counts = {int(count) for first, _, count in schedule if first <= max_num_seqs(vllm_config)}
    if schedule[0][0] > 1:
        counts.add(0)  # batches smaller than the first range have no drafts
    return tuple(sorted({min(count, most) + longest - most for count in counts}))


def has_lora(vllm_config: Any) -> bool:
    """Return whether adapters are configured."""
    return getattr(vllm_config, "lora_config", None) is not None


def max_loras(vllm_config: Any) -> int:
    """Return the maximum number of active adapters; 0 without adapters."""
    return int(getattr(vllm_config.lora_config, "max_loras", 1)) if has_lora(vllm_config) else 0


def specializes_lora(vllm_config: Any) -> bool:
    """Return whether graphs without adapters are captured as well."""
    return bool(getattr(vllm_config.compilation_config, "cudagraph_specialize_lora", True))


def specializes_active_lora(vllm_config: Any) -> bool:
    """Return whether graphs are captured for several numbers of active adapters."""
    lora = getattr(vllm_config, "lora_config", None)
    return bool(getattr(lora, "specialize_active_lora", False))


def tensor_parallel_size(vllm_config: Any) -> int:
    """Return the number of ranks that share each layer."""
    parallel = getattr(vllm_config, "parallel_config", None)
    return int(getattr(parallel, "tensor_parallel_size", 1))


def sequence_parallel(vllm_config: Any) -> bool:
    """Return whether sequence parallelism is enabled."""
    passes = getattr(vllm_config.compilation_config, "pass_config", None)
    return any(
        bool(getattr(passes, name, False)) for name in ("enable_sp", "enable_sequence_parallelism")
    )


def splits_at_attention(vllm_config: Any) -> bool:
    """Return whether the model is split at attention and compiled in pieces."""
    compilation = vllm_config.compilation_config
    splits = getattr(compilation, "is_attention_compiled_piecewise", None)
    if splits is not None:
        return bool(splits())
    # Releases 0.11.x have splitting_ops and a compilation level; level 3 compiles piecewise.
    contains = getattr(compilation, "splitting_ops_contain_attention", None)
    return getattr(compilation, "level", 3) == 3 and (contains is None or bool(contains()))


def require_splittable(vllm_config: Any, *, breakable: bool = False) -> None:
    """Reject a mode that requires piecewise compilation if the model is not split at attention.

    Args:
        vllm_config: vLLM's configuration, or any object with the same attributes.
        breakable: Whether captures can be interrupted at attention, so that no splitting is needed.

    Raises:
        AssertionError: The mode requires piecewise compilation, but the model is not split at
            attention. vLLM's dispatchers also raise an AssertionError.
    """
    mode = mode_of(vllm_config)
    splits = breakable or splits_at_attention(vllm_config)
    if mode.requires_piecewise_compilation() and not splits:
        raise AssertionError(
            f"cudagraph_mode {mode} requires a model that is split at attention and compiled in "
            f"pieces. Configure splitting_ops, or use the mode {mode.without_piecewise()}."
        )


def table_of(vllm_config: Any, name: str) -> Sequence[int] | None:
    """Return the padding table in the attribute ``name``; None if it is missing or empty."""
    table: Sequence[int] | None = getattr(vllm_config.compilation_config, name, None)
    return table or None
