"""Dispatchers that look up a padded descriptor, as in vLLM 0.11.x."""

from __future__ import annotations

from typing import Any, ClassVar

from dispatchkit import BatchDescriptor as NativeDescriptor
from dispatchkit import CUDAGraphMode, GraphKey, GraphRegistry, RuntimeMode
from dispatchkit.errors import DispatchkitError
from dispatchkit.registry import RegistryEvent

from dispatchkit_vllm.dialects import Dialect
from dispatchkit_vllm.facade import _config
from dispatchkit_vllm.facade._keys import KeySet, KeySets, is_ready
from dispatchkit_vllm.ladder import Ladder

_MAX_MEMO = 65_536


class FacadeBase:
    """Base class of the dispatchers of all versions; a registry stores the keys.

    Attributes:
        registry: The keys and their graphs.
        cudagraph_keys: The same keys as live sets of descriptors, by mode.
        keys_initialized: Whether keys were initialized; vLLM's code also assigns this attribute.
        cudagraph_mode: The active mode.
    """

    dialect: ClassVar[Dialect]
    # The types of results; ``dispatcher_for`` replaces them with the types of a vLLM release.
    mode_type: ClassVar[Any] = CUDAGraphMode
    descriptor_type: ClassVar[Any]

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.compilation_config = vllm_config.compilation_config
        _config.require_splittable(vllm_config, breakable=self.breaks_graphs())
        self.registry = GraphRegistry()
        self._modes = {mode: self.mode_type[mode.name] for mode in RuntimeMode}
        self.cudagraph_keys = KeySets(
            {
                self._modes[mode]: KeySet(self.registry, mode, self._key, self._descriptor)
                for mode in (RuntimeMode.PIECEWISE, RuntimeMode.FULL)
            }
        )
        self.keys_initialized = False
        self.cudagraph_mode = self._modes[RuntimeMode.NONE]

    @staticmethod
    def breaks_graphs() -> bool:
        """Return whether graphs can have breaks at attention, which then runs eager."""
        return False

    def add_cudagraph_key(self, runtime_mode: Any, batch_descriptor: Any) -> None:
        """Register the key of a descriptor.

        Raises:
            AssertionError: The mode is neither PIECEWISE nor FULL.
        """
        mode = CUDAGraphMode.parse(runtime_mode)
        if mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            raise AssertionError(f"runtime_mode must be PIECEWISE or FULL, got {mode}.")
        self.cudagraph_keys[self._modes[mode.runtime_mode]].add(batch_descriptor)

    def _key(self, mode: RuntimeMode, descriptor: Any) -> GraphKey:
        """Return dispatchkit's key for a descriptor."""
        raise NotImplementedError

    def _descriptor(self, key: GraphKey) -> Any:
        """Return vLLM's descriptor for one of dispatchkit's keys."""
        raise NotImplementedError

    def _declare(self, ladder: Ladder, **options: Any) -> None:
        """Register the keys of a ladder. As in vLLM, keys registered before an error remain."""
        keys = []
        try:
            for key in ladder.keys(**options):
                keys.append(self._key(key.mode, self._descriptor(key)))  # noqa: PERF401 - see the docstring
        finally:
            self.registry.declare(keys)

    def _mode_is_none(self) -> bool:
        # Compare by name: in some releases, NONE is not falsy.
        return bool(self.cudagraph_mode.name == "NONE")


class LookupDispatcher(FacadeBase):
    """A dispatcher that looks up a padded descriptor as a FULL key, then as a PIECEWISE key."""

    _has_lora_flag: ClassVar[bool] = False

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.cudagraph_mode = self.mode_type[_config.mode_of(vllm_config).name]
        self._memo: dict[tuple[Any, bool], tuple[Any, Any]] = {}
        self._unsubscribe = self.registry.subscribe(self._clear_memo)

    def initialize_cudagraph_keys(self, cudagraph_mode: Any, uniform_decode_query_len: int) -> None:
        """Register the keys of a mode. Keys of earlier calls stay registered, as in vLLM.

        Args:
            cudagraph_mode: The mode, resolved for the attention backend.
            uniform_decode_query_len: Tokens per request of a uniform decode batch.
        """
        config = self.vllm_config
        ladder = Ladder(
            dialect=self.dialect,
            mode=CUDAGraphMode.parse(cudagraph_mode),
            sizes=tuple(_config.capture_sizes(config)),
            max_num_seqs=_config.max_num_seqs(config),
            query_lens=(uniform_decode_query_len,),
            max_loras=int(_config.has_lora(config)),
            specialize_lora=_config.specializes_lora(config),
        )
        # Keep sizes that are not multiples of the query length: in graphs of these sizes, the last
        # request is shorter.
        self._declare(ladder, partial="keep")
        self.keys_initialized = True

    def dispatch(
        self, batch_descriptor: Any, use_cascade_attn: bool = False
    ) -> tuple[Any, Any | None]:
        """Return the runtime mode and the descriptor of a matching key, or (NONE, None).

        Args:
            batch_descriptor: The batch, padded by the caller.
            use_cascade_attn: Whether the batch uses cascade attention, which FULL graphs do not
                support.
        """
        if not self.keys_initialized:
            return self._modes[RuntimeMode.NONE], None
        asked = (batch_descriptor, use_cascade_attn)
        answer = self._memo.get(asked)
        if answer is None:
            memo = self._memo  # a concurrent change of keys replaces the dict
            answer = self._look_up(batch_descriptor, use_cascade_attn)
            if len(memo) >= _MAX_MEMO:
                memo.clear()
            memo[asked] = answer
        return answer

    def _clear_memo(self, event: RegistryEvent) -> None:
        self._memo = {}

    def _look_up(self, descriptor: Any, use_cascade_attn: bool) -> tuple[Any, Any | None]:
        relaxed = descriptor.non_uniform
        chain = [(RuntimeMode.FULL, descriptor), (RuntimeMode.FULL, relaxed)]
        for mode, each in [*([] if use_cascade_attn else chain), (RuntimeMode.PIECEWISE, relaxed)]:
            if self._is_ready(mode, each):
                return self._modes[mode], each
        return self._modes[RuntimeMode.NONE], None

    def _is_ready(self, mode: RuntimeMode, descriptor: Any) -> bool:
        try:
            return is_ready(self.registry, self._key(mode, descriptor))
        except DispatchkitError:
            return False  # a batch without tokens has no key

    def _key(self, mode: RuntimeMode, descriptor: Any) -> GraphKey:
        native = NativeDescriptor(
            descriptor.num_tokens,
            uniform=descriptor.uniform_decode,
            num_active_loras=int(getattr(descriptor, "has_lora", False)),
        )
        return GraphKey(mode, native)

    def _descriptor(self, key: GraphKey) -> Any:
        native = key.descriptor
        flags = (native.num_active_loras > 0,) if self._has_lora_flag else ()
        return self.descriptor_type(native.num_tokens, native.uniform, *flags)
