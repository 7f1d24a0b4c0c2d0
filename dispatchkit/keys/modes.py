"""Runtime modes, configured modes, and levels of graph support for attention.

A *runtime mode* is the way a batch runs: eager (NONE), PIECEWISE or FULL. A *configured mode* may
be a pair: one mode for uniform decode batches and one for all other batches. ``CUDAGraphMode`` has
the names, values and methods of vLLM's enum (0.33), so code written for vLLM's enum also works with
this enum.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, ClassVar

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
    """A pair of modes was given where a single mode is required.

    The class inherits from AssertionError, which vLLM's enum raises.
    """


class RuntimeMode(enum.IntEnum):
    """Ways to run a batch; with a larger value, graphs cover more of the step.

    Ranks that disagree use the smallest value, which is the most conservative mode.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, value: object, setting: str = "runtime mode") -> RuntimeMode:
        """Return the runtime mode for a member, a name or a value.

        Args:
            value: A RuntimeMode, a CUDAGraphMode, a member of another enum (such as vLLM's) with
                the name of a mode, a name in any case, or 0, 1 or 2.
            setting: Name of the setting, for the error message.

        Raises:
            ModeError: The value is a pair of runtime modes.
            UnknownNameError: No mode has that name or value.
        """
        if isinstance(value, cls):
            return value
        try:
            return CUDAGraphMode.parse(value).runtime_mode
        except ModeError as error:
            raise ModeError(setting, error.value, error.allowed) from None
        except UnknownNameError as error:
            raise UnknownNameError(setting, error.name, cls.__members__) from None


class CUDAGraphMode(enum.Enum):
    """The configured mode: how decode and mixed batches run.

    A single value applies to all batches. A pair (decode, mixed) is called a *separate routine*:
    uniform decode batches run in the first mode, all others in the second.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    # Assigned below the class, because in the enum body it would become a member.
    valid_runtime_modes: ClassVar[frozenset[CUDAGraphMode]]

    @classmethod
    def parse(cls, value: object) -> CUDAGraphMode:
        """Return the mode for a member, a name or a value.

        Args:
            value: A member, a member of another enum (such as vLLM's) with the name of a mode, a
                name in any case such as ``"full_and_piecewise"``, or the value of a member.

        Raises:
            UnknownNameError: No mode has that name or value; the message lists the closest names.
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
        """The runtime mode with the same name as this mode.

        Raises:
            ModeError: This mode is a pair.
        """
        if isinstance(self.value, tuple):
            raise ModeError("runtime mode", str(self), "NONE, PIECEWISE or FULL")
        return RuntimeMode(self.value)

    def decode_mode(self) -> CUDAGraphMode:
        """Return the mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> CUDAGraphMode:
        """Return the mode of mixed batches."""
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Return whether decode or mixed batches run in the given mode.

        Raises:
            ModeError: The given mode is a pair.
        """
        if mode.separate_routine():
            raise ModeError("mode", str(mode), "NONE, PIECEWISE or FULL")
        return mode in (self.decode_mode(), self.mixed_mode())

    def requires_piecewise_compilation(self) -> bool:
        """Return whether the model must be split at attention for this mode."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """Return the larger of the decode mode and the mixed mode."""
        parts = self.value if self.separate_routine() else (self.value,)
        return CUDAGraphMode(max(parts))

    def has_full_cudagraphs(self) -> bool:
        """Return whether decode or mixed batches run in mode FULL."""
        return self.max_cudagraph_mode() is CUDAGraphMode.FULL

    def has_piecewise_cudagraphs(self) -> bool:
        """Return whether decode or mixed batches run in mode PIECEWISE."""
        return self.requires_piecewise_compilation()

    def separate_routine(self) -> bool:
        """Return whether decode and mixed batches have separate modes."""
        return isinstance(self.value, tuple)

    def without_piecewise(self) -> CUDAGraphMode:
        """Return this mode without PIECEWISE, for steps that cannot be split."""
        return _WITHOUT_PIECEWISE.get(self, self)

    @classmethod
    def is_valid_runtime_mode(cls, mode: CUDAGraphMode) -> bool:
        """Return whether a mode is a runtime mode, not a pair."""
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

#: The modes that each code allows. Codes 0, 1 and 2 equal the value of a runtime mode, and allow
#: this mode and those below it: ``RuntimeMode.PIECEWISE`` means at most PIECEWISE. Code 3 allows
#: only PIECEWISE and code 4 only FULL, for ranks that have agreed on that mode. Code 5 excludes
#: eager, and code 6 excludes PIECEWISE.
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


def parse_modes(modes: Any, setting: str = "modes") -> frozenset[RuntimeMode]:
    """Return runtime modes given as members, names or values.

    Raises:
        ConfigError: The modes are not a list, or one of them is a pair.
        UnknownNameError: One of the names is not the name of a mode.
    """
    if isinstance(modes, str) or not isinstance(modes, Iterable):
        hint = "Put a single mode in a list, for example [RuntimeMode.FULL]."
        raise ConfigError(setting, modes, "a list of runtime modes", hint)
    return frozenset(RuntimeMode.parse(mode, f"each mode in {setting}") for mode in modes)


def allowed_modes_code(
    valid: Iterable[object] | None = None, invalid: Iterable[object] = ()
) -> int:
    """Return the code for a set of allowed runtime modes.

    The arguments correspond to those of vLLM's dispatcher and are not modified.

    Args:
        valid: Modes that may run (members or names); None means all three.
        invalid: Modes to exclude.

    Returns:
        An index into ``ALLOWED_MODES``.

    Raises:
        ConfigError: All modes are excluded, the modes are not a list, or one of them is a pair.
        UnknownNameError: One of the names is not the name of a mode.
    """
    given = parse_modes(RuntimeMode if valid is None else valid, "valid")
    excluded = parse_modes(invalid, "invalid")
    left = given - excluded
    if not left:
        raise ConfigError(
            "allowed modes",
            {"valid": sorted(map(str, given)), "invalid": sorted(map(str, excluded))},
            "at least one of NONE, PIECEWISE, FULL",
            "Allow NONE if the batch may run eager.",
        )
    return _CODES[left]


# -- what the attention backend supports --------------------------------------------------


class AttentionSupport(enum.IntEnum):
    """The batches for which attention may run inside a captured graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, value: object) -> AttentionSupport:
        """Return the level for a member, a member of another enum, or a name.

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


#: The batches for which attention can be captured, at each level between NEVER and ALWAYS.
_BATCHES = {
    AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE: "uniform decode with one token per request",
    AttentionSupport.UNIFORM_BATCH: "uniform decode",
}

#: Alias with the same prefix as ``CUDAGraphMode``.
CUDAGraphSupport = AttentionSupport


@attrs.frozen
class ModeResolution:
    """The mode in effect, and the reason for each downgrade of the requested mode.

    Attributes:
        mode: The mode in effect.
        reasons: One line per downgrade, such as ``PIECEWISE -> NONE: pieces cannot be captured``,
            in order; empty if the requested mode is in effect.
        rounds_sizes: Whether capture sizes must be rounded to multiples of the query length,
            because uniform decode batches of several tokens per request run FULL.
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
    limited_by: str = "attention",
) -> ModeResolution:
    """Return the supported mode that is closest to the requested mode.

    Args:
        mode: The requested mode.
        support: Level of the attention backend, or of each attention group; the lowest level
            applies.
        query_len: Tokens per request of a uniform decode batch.
        splits_attention: Whether the model can be split at attention.
        fully_compiled: Whether the pieces are compiled or otherwise ready to be captured.
        captures_piecewise: Whether pieces can be captured; False for a runner without pieces.
        rounds_sizes: Whether the caller uses one list of sizes for all modes, which requires
            rounding for query lengths above one. False for vLLM's Model Runner V2.
        limited_by: Subject of the messages about the level, such as ``attention`` or the names of
            pieces.

    Raises:
        ConfigError: FULL was requested for mixed batches, but the level is NEVER.

    The rules are those that vLLM 0.33 applies before it initializes its graph keys.
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
            raise _never_captured(wanted, limited_by, is_split=splits_attention)
        resolved = step_down(
            CUDAGraphMode.FULL_AND_PIECEWISE
            if splits_attention
            else CUDAGraphMode.FULL_DECODE_ONLY,
            f"{limited_by} can be captured only for {_BATCHES[level]}",
        )
    pieces = CUDAGraphMode.PIECEWISE if splits_attention else CUDAGraphMode.NONE
    if resolved.decode_mode() is CUDAGraphMode.FULL and level is AttentionSupport.NEVER:
        resolved = step_down(
            pieces if fully_compiled else CUDAGraphMode.NONE, f"{limited_by} cannot be captured"
        )
    if (
        resolved.decode_mode() is CUDAGraphMode.FULL
        and query_len > 1
        and level < AttentionSupport.UNIFORM_BATCH
    ):
        resolved = step_down(pieces, f"{limited_by} can be captured only for {_BATCHES[level]}")
    if resolved.requires_piecewise_compilation() and not captures_piecewise:
        resolved = step_down(resolved.without_piecewise(), "pieces cannot be captured")
    full_decode = resolved.decode_mode() is CUDAGraphMode.FULL
    return ModeResolution(resolved, tuple(reasons), rounds_sizes and full_decode and query_len > 1)


def _iterable(value: object) -> bool:
    """Return whether a value is a collection of levels, not a single level."""
    return isinstance(value, Iterable) and not isinstance(value, enum.Enum)


def _never_captured(mode: CUDAGraphMode, limited_by: str, *, is_split: bool) -> ConfigError:
    return ConfigError(
        "mode",
        str(mode),
        "NONE or PIECEWISE",
        "Use NONE or PIECEWISE."
        if is_split
        else f"Use NONE, or split the step at {limited_by} and use PIECEWISE.",
        message=f"Mode {mode} is not possible, because {limited_by} cannot be captured.",
    )
