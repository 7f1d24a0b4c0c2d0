"""vLLM 0.33, second model runner: each mode uses its smallest graph that fits the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dispatchkit import Batch, DispatchConfig, Dispatcher, GraphKey, GraphRegistry, RuntimeMode
from dispatchkit.keys import CUDAGraphMode

from dispatchkit_vllm.dialects import MANAGER
from dispatchkit_vllm.facade import _config
from dispatchkit_vllm.ladder import Ladder
from dispatchkit_vllm.policy import VllmPolicy

__all__ = ["BatchExecutionDescriptor", "CUDAGraphMode", "CudaGraphManager"]


@dataclasses.dataclass(frozen=True)
class BatchExecutionDescriptor:
    """How a batch runs; a field is None if the graph does not depend on it."""

    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1


class CudaGraphManager:
    """The graph manager of vLLM 0.33's second model runner, reduced to its decisions.

    Args:
        vllm_config: vLLM's configuration, or any object with the same attributes.
        device: The device of the graphs; not used for decisions.
        cudagraph_mode: The mode, resolved for the attention backend.
        decode_query_len: Tokens per request of a uniform decode batch.
        lora_capture_cases: Numbers of adapters that have graphs; by default, derived from the
            configuration.
        varlen_decode: Whether decode graphs accept requests of varying length.
        ubatch_runner: Runner of microbatches, which is stored but not used.

    Attributes:
        graphs: The caller's captured graphs, by descriptor.
        graphs_captured: Whether the caller has captured all graphs; batches run eager before that.
    """

    mode_type: Any = CUDAGraphMode
    descriptor_type: Any = BatchExecutionDescriptor

    def __init__(
        self,
        vllm_config: Any,
        device: Any,
        cudagraph_mode: Any,
        decode_query_len: int,
        lora_capture_cases: Sequence[int] | None = None,
        varlen_decode: bool = False,
        ubatch_runner: Any = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.compilation_config = vllm_config.compilation_config
        self.device = device
        mode = CUDAGraphMode.parse(cudagraph_mode)
        self.cudagraph_mode = self.mode_type[mode.name]
        self.decode_query_len = decode_query_len
        self.varlen_decode = varlen_decode
        self.ubatch_runner = ubatch_runner
        self.graphs: dict[Any, Any] = {}
        self.graphs_captured = False
        self.registry = GraphRegistry()
        most = _config.max_loras(vllm_config)
        self._ladder = Ladder(
            dialect=MANAGER,
            mode=mode,
            sizes=tuple(sorted(set(_config.capture_sizes(vllm_config)))),
            max_num_seqs=_config.max_num_seqs(vllm_config),
            query_lens=_config.decode_query_lens(vllm_config, decode_query_len),
            max_loras=most + 1 if most else 0,
            specialize_lora=_config.specializes_lora(vllm_config),
            specialize_active_loras=_config.specializes_active_lora(vllm_config),
            varlen=varlen_decode,
            cases=None if lora_capture_cases is None else tuple(lora_capture_cases),
        )
        self.lora_capture_cases = list(self._ladder.lora_cases)
        self.registry.declare(self._ladder.keys())
        self._core = self._make_core() if self._ladder.max_size else None

    def _make_core(self) -> Dispatcher:
        ladder = self._ladder
        config = DispatchConfig(
            mode=ladder.mode,
            sizes=ladder.sizes,
            max_num_tokens=ladder.max_size,
            max_num_seqs=ladder.max_num_seqs,
            query_lens=ladder.query_lens,
            varlen_decode=self.varlen_decode,
            max_loras=max(ladder.lora_cases),
        )
        policy = VllmPolicy(MANAGER, ladder=ladder)
        return Dispatcher(policy, config, registry=self.registry, lazy=True, bind=self._bind)

    def _bind(self, decision: Any, batch: Batch) -> Any:
        return None if decision.key is None else self._descriptor(decision.key)

    def _descriptor(self, key: GraphKey) -> Any:
        native = key.descriptor
        return self.descriptor_type(
            self.mode_type[key.mode.name],
            native.num_tokens,
            native.num_reqs,
            native.query_len if native.uniform else None,
            native.max_query_len,
            native.num_active_loras,
        )

    @property
    def capture_descs(self) -> dict[Any, list[Any]]:
        """The descriptors to capture, by mode: PIECEWISE first, largest sizes first."""
        found: dict[Any, list[Any]] = {}
        for mode in (RuntimeMode.PIECEWISE, RuntimeMode.FULL):
            keys = [key for key in self.registry if key.mode is mode]
            if keys:
                keys.sort(key=lambda key: key.num_tokens, reverse=True)
                found[self.mode_type[mode.name]] = [self._descriptor(key) for key in keys]
        return found

    def needs_capture(self) -> bool:
        """Return whether there are graphs to capture."""
        return len(self.registry) > 0

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> Any:
        """Return the descriptor of the graph for a batch, or an eager descriptor.

        Args:
            num_reqs: Number of requests in the batch.
            num_tokens: Number of unpadded tokens.
            uniform_token_count: Tokens per request if all requests have the same number, else None.
            num_active_loras: Number of active adapters.
            max_query_len: Largest number of tokens of a request, if known.
            num_ubatches: Number of microbatches; batches with more than one run eager.
        """
        case = self._ladder.lora_case(num_active_loras)
        found = None
        if self.graphs_captured and num_ubatches == 1:
            found = self._find(num_reqs, num_tokens, uniform_token_count, case, max_query_len)
        return found or self.descriptor_type(
            self.mode_type["NONE"], num_tokens, num_reqs, num_active_loras=case
        )

    def _find(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        case: int,
        max_query_len: int | None,
    ) -> Any | None:
        core = self._core
        if core is None or not 0 < num_tokens <= self._ladder.max_size:
            return None
        query_len, kind = self.decode_query_len, 0
        if self.varlen_decode:
            if max_query_len is not None and max_query_len <= query_len:
                kind = core.config.num_query_classes - 1
        elif uniform_token_count in self._ladder.query_lens:
            kind = 1 + self._ladder.query_lens.index(uniform_token_count)
        if case > core.config.max_loras:
            return None
        if num_reqs <= min(num_tokens, self._ladder.max_num_seqs):
            return core.dispatch(num_tokens, num_reqs, kind, case).plan
        # vLLM accepts batches with more requests than tokens or max_num_seqs, but
        # Dispatcher.dispatch rejects them.
        uniform, length, longest = core.config.query_class(kind)
        batch = Batch(num_tokens, num_reqs, uniform, length, longest, case)
        return self._bind(core.decide(batch), batch)
