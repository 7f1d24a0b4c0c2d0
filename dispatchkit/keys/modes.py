"""Runtime modes, configured modes, and which of them a backend supports.

A *runtime mode* is what one batch runs as: eager (NONE), PIECEWISE or FULL. A *configured
mode* may be a pair: one mode for uniform decode batches, another for everything else.
Names, values and methods of ``CUDAGraphMode`` are those of vLLM's enum (0.33), so that code
written for it reads the same here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import ClassVar

import attrs

from dispatchkit.errors import ConfigError, UnknownNameError

__all__ = [
    "ALLOWED_MODES",
    "AttentionSupport",
    "CUDAGraphMode",
    "CUDAGraphSupport",
    "ModeError",
    "ModeResolution",
    "RuntimeMode",
    "allowed_modes_code",
    "resolve_mode",
]


class ModeError(ConfigError, AssertionError):
    """A configured mode was given where a runtime mode is required.

    Also an AssertionError, which is what vLLM's enum raises.
    """


class RuntimeMode(enum.IntEnum):
    """What one batch runs as, ordered by how much of the step one graph covers.

    Ranks that disagree take the smallest value, the most conservative mode.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, value: object) -> RuntimeMode:
        """Return the runtime mode that a member, a name (any case) or a value stands for.

        Args:
            value: A RuntimeMode, a CUDAGraphMode, any enum member of the same name (vLLM's
                own), a name, or 0, 1, 2.

        Raises:
            ModeError: It is a configured mode that pairs two runtime modes.
            UnknownNameError: No mode has that name.
        """
        if isinstance(value, cls):
            return value
        try:
            return CUDAGraphMode.parse(value).runtime_mode
        except UnknownNameError as error:
            raise UnknownNameError("mode", error.name, cls.__members__) from None


class CUDAGraphMode(enum.Enum):
    """The configured mode: how decode batches and all other batches run.

    A single value applies to all batches. A pair (decode value, mixed value) asks for a *separate
    routine*: uniform decode batches run in the first mode, the rest in the second.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    # Assigned below the class: in the enum body it would become a member.
    valid_runtime_modes: ClassVar[frozenset[CUDAGraphMode]]

    @classmethod
    def parse(cls, value: object) -> CUDAGraphMode:
        """Return the mode that a member, a name (any case) or a value stands for.

        Args:
            value: A member, an enum member of the same name, text such as
                ``"full_and_piecewise"``, or a member's value.

        Raises:
            UnknownNameError: No mode has that name; the message lists the closest ones.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, enum.Enum):
            value = value.name
        if isinstance(value, str):
            name = value.strip().upper().replace("-", "_")
            if name in cls.__members__:
                return cls[name]
        elif not isinstance(value, bool):
            for mode in cls:
                if mode.value == value:
                    return mode
        text = value if isinstance(value, str) else repr(value)
        raise UnknownNameError("mode", text, cls.__members__)

    @property
    def runtime_mode(self) -> RuntimeMode:
        """The runtime mode of a member that is not a pair.

        Raises:
            ModeError: The member is a pair.
        """
        if isinstance(self.value, tuple):
            raise ModeError("runtime mode", str(self), "NONE, PIECEWISE or FULL")
        return RuntimeMode(self.value)

    def decode_mode(self) -> CUDAGraphMode:
        """Return the mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> CUDAGraphMode:
        """Return the mode of all batches that are not uniform decode."""
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Return whether decode or mixed batches run in a mode.

        Raises:
            ModeError: The mode asked about is itself a pair.
        """
        if mode.separate_routine():
            raise ModeError("mode", str(mode), "NONE, PIECEWISE or FULL")
        return mode in (self.decode_mode(), self.mixed_mode())

    def requires_piecewise_compilation(self) -> bool:
        """Return whether the model must be split at attention for this mode."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """Return the larger of the two parts."""
        parts = self.value if self.separate_routine() else (self.value,)
        return CUDAGraphMode(max(parts))

    def has_full_cudagraphs(self) -> bool:
        """Return whether any batch runs as one whole graph."""
        return self.max_cudagraph_mode() is CUDAGraphMode.FULL

    def has_piecewise_cudagraphs(self) -> bool:
        """Return whether any batch runs as pieces."""
        return self.requires_piecewise_compilation()

    def separate_routine(self) -> bool:
        """Return whether uniform decode batches run in another mode than the rest."""
        return isinstance(self.value, tuple)

    def without_piecewise(self) -> CUDAGraphMode:
        """Return this mode without its PIECEWISE part, for steps that cannot be split."""
        return _WITHOUT_PIECEWISE.get(self, self)

    @classmethod
    def is_valid_runtime_mode(cls, mode: CUDAGraphMode) -> bool:
        """Return whether a mode can be the result of a dispatch."""
        return mode in cls.valid_runtime_modes

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE

    def __str__(self) -> str:
        return self.name


CUDAGraphMode.valid_runtime_modes = frozenset(
    (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
)
_WITHOUT_PIECEWISE = {
    CUDAGraphMode.PIECEWISE: CUDAGraphMode.NONE,
    CUDAGraphMode.FULL_AND_PIECEWISE: CUDAGraphMode.FULL_DECODE_ONLY,
}


# -- allowed modes as one small int -------------------------------------------------------

#: The modes that each code allows. 0, 1 and 2 are ceilings equal to the runtime mode's value, so
#: "at most PIECEWISE" is simply ``RuntimeMode.PIECEWISE``. 3 to 6 are the sets that exclude eager
#: or skip a mode; ranks that have agreed on one mode need them.
ALLOWED_MODES: tuple[frozenset[RuntimeMode], ...] = (
    frozenset((RuntimeMode.NONE,)),
    frozenset((RuntimeMode.NONE, RuntimeMode.PIECEWISE)),
    frozenset((RuntimeMode.NONE, RuntimeMode.PIECEWISE, RuntimeMode.FULL)),
    frozenset((RuntimeMode.PIECEWISE,)),
    frozenset((RuntimeMode.FULL,)),
    frozenset((RuntimeMode.PIECEWISE, RuntimeMode.FULL)),
    frozenset((RuntimeMode.NONE, RuntimeMode.FULL)),
)
_CODES = {modes: code for code, modes in enumerate(ALLOWED_MODES)}


def allowed_modes_code(
    valid: Iterable[object] | None = None, invalid: Iterable[object] = ()
) -> int:
    """Return the code of the runtime modes that a batch may run as.

    The arguments are those of vLLM's dispatcher and are not modified.

    Args:
        valid: Modes to choose from (members or names); None means all three.
        invalid: Modes to leave out.

    Returns:
        An index into ``ALLOWED_MODES``.

    Raises:
        ConfigError: No mode is left.
        UnknownNameError: No mode has that name.
    """
    given = frozenset(RuntimeMode if valid is None else map(RuntimeMode.parse, valid))
    excluded = frozenset(map(RuntimeMode.parse, invalid))
    left = given - excluded
    if not left:
        raise ConfigError(
            "allowed modes",
            {"valid": sorted(map(str, given)), "invalid": sorted(map(str, excluded))},
            "at least one of NONE, PIECEWISE, FULL",
            "Leave NONE allowed where eager is acceptable.",
        )
    return _CODES[left]


# -- what the attention backend supports --------------------------------------------------


class AttentionSupport(enum.IntEnum):
    """For which batches an attention implementation may run inside a captured graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, value: object) -> AttentionSupport:
        """Return the level that a member, an enum member of the same name, or a name stands for.

        Raises:
            UnknownNameError: No level has that name.
        """
        if isinstance(value, cls):
            return value
        name = value.name if isinstance(value, enum.Enum) else str(value)
        name = name.strip().upper().replace("-", "_")
        if name not in cls.__members__:
            raise UnknownNameError("attention support", name, cls.__members__)
        return cls[name]


#: The same levels under the name that users of graph runners look for.
CUDAGraphSupport = AttentionSupport


@attrs.frozen
class ModeResolution:
    """The mode that will be used, with the reason for each downgrade from the one requested.

    Attributes:
        mode: The mode that is supported.
        reasons: One sentence per downgrade, in order; empty if nothing changed.
        rounds_sizes: Capture sizes must become multiples of the query length, because
            uniform decode batches of several tokens per request run FULL.
    """

    mode: CUDAGraphMode
    reasons: tuple[str, ...] = ()
    rounds_sizes: bool = False


def resolve_mode(
    mode: CUDAGraphMode | str,
    support: AttentionSupport | str | Iterable[AttentionSupport | str] = AttentionSupport.ALWAYS,
    *,
    query_len: int = 1,
    splits_attention: bool = True,
    fully_compiled: bool = True,
    captures_piecewise: bool = True,
    rounds_sizes: bool = True,
) -> ModeResolution:
    """Return the supported mode closest to the one requested.

    Args:
        mode: The mode requested.
        support: Level of the attention backend, or of each attention group; the least counts.
        query_len: Tokens per request of a uniform decode batch.
        splits_attention: The model can be cut at attention.
        fully_compiled: The pieces are compiled (or otherwise ready to be captured).
        captures_piecewise: Pieces can be captured at all; False for a runner without pieces.
        rounds_sizes: The caller shares one size list between modes, so that a query length above
            one requires rounding (vLLM's second model runner does not share one).

    Raises:
        ConfigError: FULL was requested for mixed batches, and attention can never be captured.

    Source: behaviour of vLLM 0.33 before its keys are initialised.
    """
    resolved = wanted = CUDAGraphMode.parse(mode)
    levels = (
        (support,)
        if isinstance(support, (str, AttentionSupport)) or not _iterable(support)
        else tuple(support)
    )
    level = min(map(AttentionSupport.parse, levels), default=AttentionSupport.ALWAYS)
    reasons: list[str] = []

    def step_down(to: CUDAGraphMode, why: str) -> CUDAGraphMode:
        reasons.append(f"{resolved} -> {to}: {why}")
        return to

    if resolved.mixed_mode() is CUDAGraphMode.FULL and level < AttentionSupport.ALWAYS:
        if level is AttentionSupport.NEVER:
            raise _never_captured(wanted)
        resolved = step_down(
            CUDAGraphMode.FULL_AND_PIECEWISE
            if splits_attention
            else CUDAGraphMode.FULL_DECODE_ONLY,
            f"attention is captured for {level} batches only, not for mixed ones",
        )
    pieces = CUDAGraphMode.PIECEWISE if splits_attention else CUDAGraphMode.NONE
    if resolved.decode_mode() is CUDAGraphMode.FULL and level is AttentionSupport.NEVER:
        resolved = step_down(
            pieces if fully_compiled else CUDAGraphMode.NONE, "attention is never captured"
        )
    if (
        resolved.decode_mode() is CUDAGraphMode.FULL
        and query_len > 1
        and level < AttentionSupport.UNIFORM_BATCH
    ):
        resolved = step_down(
            pieces, f"attention is not captured for {query_len} tokens per request"
        )
    if resolved.requires_piecewise_compilation() and not captures_piecewise:
        resolved = step_down(resolved.without_piecewise(), "no pieces can be captured here")
    if resolved.has_full_cudagraphs() and level is AttentionSupport.NEVER:
        raise _never_captured(wanted)
    full_decode = resolved.decode_mode() is CUDAGraphMode.FULL
    return ModeResolution(resolved, tuple(reasons), rounds_sizes and full_decode and query_len > 1)


def _iterable(value: object) -> bool:
    """Distinguish a collection of levels from one level of a foreign enum."""
    return isinstance(value, Iterable) and not isinstance(value, enum.Enum)


def _never_captured(mode: CUDAGraphMode) -> ConfigError:
    return ConfigError(
        "cudagraph_mode",
        str(mode),
        "NONE or PIECEWISE with an attention backend that is never captured",
        "Choose one of these, or another attention backend.",
    )
