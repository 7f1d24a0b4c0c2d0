"""Handle functions wrapped in ``torch.compile`` during warmups and captures.

Under a dispatch mode that must observe every operation, Dynamo does not compile the code that it
encounters, but permanently marks this code as skipped. After one call under such a mode, a compiled
model would run uncompiled for the rest of the process. Under these modes, compiled functions
therefore run eager through ``torch.compiler.set_stance``, which changes neither their code nor
existing compilations.

Source: ``CatchErrorsWrapper`` in torch/_dynamo/convert_frame.py and ``ConvertFrameReturn`` in
torch/_dynamo/types.py of torch 2.11 to 2.13, which determine when and for how long a frame is
skipped.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch


def dynamo_is_loaded() -> bool:
    """Return whether Dynamo, which takes seconds to import, is already imported."""
    return "torch._dynamo" in sys.modules


class ThreadCounts:
    """One count per thread; truthy while any count is above 0."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    @property
    def here(self) -> int:
        """The count of this thread."""
        return self._counts.get(threading.get_ident(), 0)

    def set(self, count: int) -> None:
        """Set the count of this thread."""
        if count:
            self._counts[threading.get_ident()] = count
        else:
            self._counts.pop(threading.get_ident(), None)


class _ForceEager:
    """A switch that makes compiled functions run eager while any thread requests it.

    The switch affects the whole process, so compiled functions called by other threads also run
    eager. A capture warns if a request of another thread may have affected it.

    Attributes:
        num_begun: Total number of requests.
        on: Number of active requests of each thread.
    """

    num_begun: int

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.on = ThreadCounts()
        self._stance: Any = None
        self.num_begun = 0

    def begin(self) -> bool:
        """Request eager execution; return whether ``end`` must be called.

        Inside compiled code, a request has no effect.
        """
        if not dynamo_is_loaded():
            return False
        from torch._C._dynamo.eval_frame import get_eval_frame_callback

        if get_eval_frame_callback() not in (None, False):
            return False  # inside compiled code, where torch does not allow changing the stance
        with self._lock:
            if self._stance is None:
                self._stance = torch.compiler.set_stance("force_eager")
            self.on.set(self.on.here + 1)
            self.num_begun += 1
        return True

    @property
    def is_on(self) -> bool:
        """Whether any thread requests eager execution."""
        return bool(self.on)

    def end(self, depth: int | None = None) -> None:
        """End a request of this thread.

        Args:
            depth: Number of this thread's requests that remain active; None to end one request.
        """
        with self._lock:
            self.on.set(self.on.here - 1 if depth is None else depth)
            if not self.on and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


FORCE_EAGER = _ForceEager()


@contextmanager
def force_eager() -> Iterator[None]:
    """Make compiled functions run eager in a ``with`` block."""
    begun = FORCE_EAGER.begin()
    try:
        yield
    finally:
        if begun:
            FORCE_EAGER.end()


class Calls:
    """A counter of operations that run uncompiled in functions wrapped in torch.compile.

    The stack contains a second function of Dynamo between a function's wrapper and its compiled
    code. The frame of this second function identifies operations of compiled code.

    Args:
        outermost: ``id`` of the frame where the search of the stack ends. The frame is not kept
            alive.

    Attributes:
        num_plain: Number of operations that ran uncompiled.
    """

    def __init__(self, outermost: int = 0) -> None:
        self.num_plain: int = 0
        self._outermost = outermost

    def note(self, frame: FrameType | None) -> bool:
        """Count an operation if a wrapped function runs it uncompiled; return whether it does.

        Args:
            frame: Frame of the operation's caller.
        """
        while frame is not None and _is_dynamo_frame(frame):
            frame = frame.f_back  # skip Dynamo's wrapper around the mode's handler
        while frame is not None and id(frame) != self._outermost:
            if _is_dynamo_frame(frame):
                if frame.f_code.co_name != _WRAPPER:
                    return False
                self.num_plain += 1
                return True
            frame = frame.f_back
        return False


_WRAPPER = "compile_wrapper"


def _is_dynamo_frame(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _dynamo_files()


@cache
def _dynamo_files() -> frozenset[str | None]:
    """Return the files of Dynamo that define the wrappers of compiled and disabled functions."""
    import torch._compile
    from torch._dynamo import eval_frame

    return frozenset((eval_frame.__file__, torch._compile.__file__))


@contextmanager
def every_size_compiled() -> Iterator[None]:
    """Allow Dynamo to compile a function for every size that is warmed up.

    With Dynamo's default ``recompile_limit`` of 8, a function without dynamic shapes would run
    eager from the ninth size on, with only a log message. Dynamo's ``accumulated_recompile_limit``,
    which is larger, still applies.
    """
    if not dynamo_is_loaded():
        yield
        return
    from torch._dynamo import config

    before = config.recompile_limit
    # config.patch() is not used because each call creates a class that only the garbage collector
    # frees.
    config.recompile_limit = max(before, config.accumulated_recompile_limit)
    try:
        yield
    finally:
        config.recompile_limit = before
