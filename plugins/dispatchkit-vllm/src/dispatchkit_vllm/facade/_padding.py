"""Dispatchers that pad batches themselves, as in vLLM from 0.12 on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs

from dispatchkit import (
    Batch,
    CUDAGraphMode,
    Decision,
    DispatchConfig,
    Dispatcher,
    GraphKey,
    Policy,
    RuntimeMode,
)
from dispatchkit import BatchDescriptor as NativeDescriptor
from dispatchkit.errors import NoGraphError, counted
from dispatchkit.keys import ALLOWED_MODES, padding_table

from dispatchkit_vllm.facade import _config
from dispatchkit_vllm.facade._keys import CONTRADICTORY, is_ready
from dispatchkit_vllm.facade._lookup import FacadeBase
from dispatchkit_vllm.ladder import Ladder, PartialRequestError
from dispatchkit_vllm.policy import VllmPolicy


class PaddingDispatcher(FacadeBase):
    """A dispatcher that pads batches and dispatches them through dispatchkit.

    Args:
        vllm_config: vLLM's configuration, or any object with the same attributes.
        policy: A policy that replaces the rule of the release.
    """

    _counts_loras: ClassVar[bool] = True

    def __init__(self, vllm_config: Any, policy: Policy | None = None) -> None:
        super().__init__(vllm_config)
        self.uniform_decode_query_len = _config.query_len(vllm_config)
        self._policy = policy
        self._none = self._modes[RuntimeMode.NONE]
        self._max_size_name = _config.max_size_name(vllm_config)
        self._separate = False
        self._ladder: Ladder | None = None
        self._core: Dispatcher | None = None
        self._table: Sequence[int] = ()

    # -- setup --------------------------------------------------------------------------

    def _initialize(self, cudagraph_mode: Any, uniform_decode_query_len: int) -> None:
        """Register the keys of a mode. Keys of earlier calls stay registered, as in vLLM.

        Args:
            cudagraph_mode: The mode, resolved for the attention backend.
            uniform_decode_query_len: Query length that limits the sizes of decode keys to the range
                from this length to ``max_num_seqs`` times this length. The number of requests of a
                key depends on the query length in the configuration instead.

        Raises:
            AssertionError: A decode size is not a multiple of the query length. Keys registered
                before the error remain, and the dispatcher stays uninitialized.
        """
        mode = CUDAGraphMode.parse(cudagraph_mode)
        sizes = self._sizes()
        if sizes is None or (mode is CUDAGraphMode.NONE and self._skips_mode_none):
            self._finish(mode)
            return
        self._table = self._padding_table(sizes, mode)
        ladder = self._make_ladder(mode, sizes)
        try:
            if self._policy is None:
                self._declare(ladder, window_query_len=uniform_decode_query_len, partial="raise")
        except PartialRequestError as error:
            raise AssertionError(str(error)) from error
        self._install(ladder)
        self._finish(mode)

    #: Whether initialization with mode NONE leaves the padding table empty.
    _skips_mode_none: ClassVar[bool] = False

    def _sizes(self) -> list[int] | None:
        return _config.capture_sizes(self.vllm_config)

    def _padding_table(self, sizes: list[int], mode: CUDAGraphMode) -> Sequence[int]:
        return _config.table_of(self.vllm_config, "bs_to_padded_graph_size") or padding_table(sizes)

    def _max_loras(self) -> int:
        """Return the largest number of adapters in a key of this release."""
        return int(_config.has_lora(self.vllm_config))

    def _make_ladder(self, mode: CUDAGraphMode, sizes: list[int]) -> Ladder:
        config = self.vllm_config
        return Ladder(
            dialect=self.dialect,
            mode=mode,
            sizes=tuple(sizes),
            max_num_seqs=_config.max_num_seqs(config),
            query_lens=(self.uniform_decode_query_len,),
            max_loras=self._max_loras(),
            specialize_lora=_config.specializes_lora(config),
            specialize_active_loras=_config.specializes_active_lora(config),
        )

    def _install(self, ladder: Ladder) -> None:
        self._ladder = ladder
        if not ladder.max_size:
            self._core = None
            return
        config = DispatchConfig(
            mode=ladder.mode,
            sizes=tuple(sorted(ladder.sizes)),
            max_num_tokens=ladder.max_size,
            max_num_seqs=ladder.max_num_seqs,
            query_lens=ladder.query_lens,
            max_loras=ladder.max_loras,
            specialize_lora=ladder.specialize_lora,
            specialize_active_loras=ladder.specialize_active_loras,
        )
        policy = self._policy or VllmPolicy(self.dialect, ladder=ladder)
        if self._core is None:
            self._core = Dispatcher(
                policy, config, registry=self.registry, lazy=True, bind=self._bind
            )
        else:
            self._core.swap(policy, config)

    def _finish(self, mode: CUDAGraphMode) -> None:
        self.cudagraph_mode = self.mode_type[mode.name]
        self._separate = mode.separate_routine()
        self.keys_initialized = True

    @property
    def padding_table(self) -> Sequence[int]:
        """The bucket of each number of tokens; empty before initialization."""
        return self._table

    def _bind(self, decision: Decision, batch: Batch) -> Any:
        """Return the prepared result of ``dispatch`` for a cell."""
        if decision.key is None:
            return None
        return self._modes[decision.mode], self._descriptor(decision.key)

    # -- the step -----------------------------------------------------------------------

    def _runs_eager(self, num_tokens: int) -> bool:
        """Return whether all batches of this number of tokens run eager."""
        if not self.keys_initialized or self.cudagraph_mode is self._none:
            return True
        # Read the configuration in each call, as vLLM does.
        largest = len(self._table) - 1
        most = getattr(self.compilation_config, self._max_size_name, largest)
        return most is None or num_tokens > most

    def _eager(self, num_tokens: int) -> tuple[Any, Any]:
        return self._modes[RuntimeMode.NONE], self.descriptor_type(num_tokens)

    def _decide(
        self, num_tokens: int, uniform: bool, has_lora: bool, loras: int, allowed: int
    ) -> tuple[Any, Any]:
        """Return the runtime mode and descriptor for a batch within the capture sizes.

        Args:
            num_tokens: Number of unpadded tokens. A negative number indexes the padding table
                from its end, as in vLLM.
            uniform: Whether the batch is a uniform decode batch.
            has_lora: Adapter flag of the descriptor to look up.
            loras: Number of adapters of the descriptor to look up.
            allowed: Code of the allowed modes, an index into ``ALLOWED_MODES``.

        Raises:
            AssertionError: The bucket of a uniform batch is not a multiple of the query length.
                Also raised if no graph serves the batch and eager is not allowed.
        """
        bucket = self._table[num_tokens]
        ladder, core = self._ladder, self._core
        if ladder is None or core is None or bucket == 0:
            return self._miss(num_tokens, allowed)
        if uniform and self._policy is None and bucket % self.uniform_decode_query_len:
            if ladder.mode.has_full_cudagraphs():
                raise AssertionError(
                    str(PartialRequestError(bucket, self.uniform_decode_query_len))
                )
        if has_lora != (loras > 0) or loras > ladder.max_loras:
            found = self._search(ladder, bucket, uniform, has_lora, loras, allowed)
            return found or self._miss(num_tokens, allowed)
        try:
            decision = core.dispatch(
                num_tokens if num_tokens > 0 else bucket, 0, uniform, loras, allowed
            )
        except NoGraphError as error:
            raise AssertionError(str(error)) from error
        return decision.plan or self._eager(num_tokens)

    def _search(
        self,
        ladder: Ladder,
        bucket: int,
        uniform: bool,
        has_lora: bool,
        loras: int,
        allowed: int,
    ) -> tuple[Any, Any] | None:
        """Return the runtime mode and descriptor of a key that only vLLM accepts, or None.

        In such a key, the adapter flag contradicts the number of adapters, or this number is above
        the maximum. The facade registers no such key; the caller may have added one.
        """
        marks: Any = CONTRADICTORY if has_lora != (loras > 0) else ()
        query_len = self.uniform_decode_query_len if uniform else 0
        for key in ladder.chain(bucket, query_len, loras):
            marked = GraphKey(key.mode, attrs.evolve(key.descriptor, axes=marks))
            if key.mode in ALLOWED_MODES[allowed] and is_ready(self.registry, marked):
                return self._modes[key.mode], self._descriptor(marked)
        return None

    def _miss(self, num_tokens: int, allowed: int) -> tuple[Any, Any]:
        if RuntimeMode.NONE not in ALLOWED_MODES[allowed]:
            raise AssertionError(
                f"No graph serves {counted(num_tokens, 'token')}, and eager is not allowed. "
                "Add NONE to valid_modes, or remove it from invalid_modes."
            )
        return self._eager(num_tokens)

    # -- descriptors --------------------------------------------------------------------

    def _key(self, mode: RuntimeMode, descriptor: Any) -> GraphKey:
        has_lora = bool(descriptor.has_lora)
        count = descriptor.num_active_loras if self._counts_loras else int(has_lora)
        marks: Any = CONTRADICTORY if has_lora != (count > 0) else ()
        native = NativeDescriptor(
            descriptor.num_tokens,
            num_reqs=descriptor.num_reqs,
            uniform=descriptor.uniform,
            num_active_loras=count,
            query_len=self.uniform_decode_query_len if descriptor.uniform else 0,
            axes=marks,
        )
        return GraphKey(mode, native)

    def _descriptor(self, key: GraphKey) -> Any:
        native = key.descriptor
        count = native.num_active_loras
        has_lora = (count > 0) != (native.axes == CONTRADICTORY)
        counts = (count,) if self._counts_loras else ()
        return self.descriptor_type(
            native.num_tokens, native.num_reqs, native.uniform, has_lora, *counts
        )
