"""Read a vLLM configuration, or any object with the attributes used.

Attributes moved between releases; each function knows all places of one fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatchkit.keys import CUDAGraphMode


def mode_of(vllm_config: Any) -> CUDAGraphMode:
    """The configured mode; NONE if the configuration has none."""
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    return CUDAGraphMode.NONE if mode is None else CUDAGraphMode.parse(mode)


def capture_sizes(vllm_config: Any) -> list[int]:
    """Capture sizes in the order of the configuration."""
    return list(getattr(vllm_config.compilation_config, "cudagraph_capture_sizes", None) or ())


def max_size_name(vllm_config: Any) -> str:
    """The attribute of the compilation settings that holds the largest capture size."""
    old = "max_capture_size"
    return old if hasattr(vllm_config.compilation_config, old) else "max_cudagraph_capture_size"


def max_num_seqs(vllm_config: Any) -> int:
    """The most requests of a batch."""
    return int(vllm_config.scheduler_config.max_num_seqs)


def query_len(vllm_config: Any) -> int:
    """Tokens per request of a uniform decode batch: one plus the speculative tokens."""
    speculative = getattr(vllm_config, "speculative_config", None)
    count = getattr(speculative, "num_speculative_tokens", None)
    if count is None and (
        speculative is not None or not hasattr(vllm_config, "speculative_config")
    ):
        # The newest releases resolve the number in the configuration itself.
        count = getattr(vllm_config, "num_speculative_tokens", None)
    return 1 + int(count or 0)


def decode_query_lens(vllm_config: Any, longest: int) -> tuple[int, ...]:
    """Query lengths of uniform decode batches: several under dynamic speculative decoding.

    Args:
        vllm_config: The configuration.
        longest: Tokens per request with every speculative token.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    is_dynamic = getattr(speculative, "uses_dynamic_speculative_decoding", None)
    most = int(getattr(vllm_config, "num_speculative_tokens", 0) or 0)
    if is_dynamic is None or not is_dynamic() or longest <= most:
        return (longest,)
    schedule = sorted(speculative.num_speculative_tokens_per_batch_size)  # type: ignore[union-attr]
    counts = {int(count) for first, _, count in schedule if first <= max_num_seqs(vllm_config)}
    if schedule[0][0] > 1:
        counts.add(0)  # batches smaller than the first range draft nothing
    return tuple(sorted({min(count, most) + longest - most for count in counts}))


def has_lora(vllm_config: Any) -> bool:
    """Whether adapters are configured."""
    return getattr(vllm_config, "lora_config", None) is not None


def max_loras(vllm_config: Any) -> int:
    """The most adapters loaded at once; 0 without adapters."""
    return int(getattr(vllm_config.lora_config, "max_loras", 1)) if has_lora(vllm_config) else 0


def specializes_lora(vllm_config: Any) -> bool:
    """Whether graphs without adapters are captured as well."""
    return bool(getattr(vllm_config.compilation_config, "cudagraph_specialize_lora", True))


def specializes_active_lora(vllm_config: Any) -> bool:
    """Whether several counts of active adapters have graphs."""
    lora = getattr(vllm_config, "lora_config", None)
    return bool(getattr(lora, "specialize_active_lora", False))


def tensor_parallel_size(vllm_config: Any) -> int:
    """Number of ranks that share one layer."""
    parallel = getattr(vllm_config, "parallel_config", None)
    return int(getattr(parallel, "tensor_parallel_size", 1))


def sequence_parallel(vllm_config: Any) -> bool:
    """Whether sequence parallelism is on."""
    passes = getattr(vllm_config.compilation_config, "pass_config", None)
    return any(
        bool(getattr(passes, name, False)) for name in ("enable_sp", "enable_sequence_parallelism")
    )


def splits_at_attention(vllm_config: Any) -> bool:
    """Whether attention is compiled piecewise."""
    compilation = vllm_config.compilation_config
    splits = getattr(compilation, "is_attention_compiled_piecewise", None)
    if splits is not None:
        return bool(splits())
    # The 0.11 line has a compilation level, of which 3 is piecewise, and the splitting ops.
    contains = getattr(compilation, "splitting_ops_contain_attention", None)
    return getattr(compilation, "level", 3) == 3 and (contains is None or bool(contains()))


def require_splittable(vllm_config: Any, *, breakable: bool = False) -> None:
    """Reject a piecewise mode for a model that is compiled as a whole.

    Args:
        vllm_config: The configuration.
        breakable: A capture can be interrupted at attention, so nothing needs to be split.

    Raises:
        AssertionError: As vLLM's dispatchers do.
    """
    mode = mode_of(vllm_config)
    splits = breakable or splits_at_attention(vllm_config)
    if mode.requires_piecewise_compilation() and not splits:
        raise AssertionError(
            f"cudagraph_mode {mode} needs a model that is compiled in pieces at attention, and "
            f"this one is not. Split it there, or use {mode.without_piecewise()}."
        )


def table_of(vllm_config: Any, name: str) -> Sequence[int] | None:
    """Return a padding table from the configuration, or None if it has none."""
    table: Sequence[int] | None = getattr(vllm_config.compilation_config, name, None)
    return table or None
