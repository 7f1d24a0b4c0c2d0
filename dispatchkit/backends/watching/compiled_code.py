"""Functions of ``torch.compile`` inside a step that is watched, warmed up or captured.

Under a dispatch mode that must see every operation, Dynamo compiles nothing, and marks the code
it then skips for good: once called so, a compiled model runs uncompiled for the rest of the
process. So under such a mode torch's own switch (``torch.compiler.set_stance``) makes compiled
functions run eager, which touches neither their code nor what is compiled already.

Source: ``CatchErrorsWrapper`` in torch/_dynamo/convert_frame.py and ``ConvertFrameReturn`` in
torch/_dynamo/types.py of torch 2.11 to 2.13, which say when a frame is skipped and for how long.
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
    """Return whether anything can have been compiled: to load Dynamo takes seconds."""
    return "torch._dynamo" in sys.modules


class ThreadCounts:
    """A count for each thread; true while any of them is above 0."""

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
    """Makes compiled functions run eager while anybody needs it.

    The switch is the process's: a compiled function that another thread calls in that moment
    runs eager, too. A capture during which that may have happened warns.

    Attributes:
        num_begun: How often it was switched on.
        on: How often each thread needs it.
    """

    num_begun: int

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.on = ThreadCounts()
        self._stance: Any = None
        self.num_begun = 0

    def begin(self) -> bool:
        """Switch on; return whether ``end`` must follow.

        Inside code that Dynamo runs it cannot be switched.
        """
        if not dynamo_is_loaded():
            return False
        from torch._C._dynamo.eval_frame import get_eval_frame_callback

        if get_eval_frame_callback() not in (None, False):
            return False  # inside compiled code, where torch allows no switching
        with self._lock:
            if self._stance is None:
                self._stance = torch.compiler.set_stance("force_eager")
            self.on.set(self.on.here + 1)
            self.num_begun += 1
        return True

    @property
    def is_on(self) -> bool:
        """Whether it is on now."""
        return bool(self.on)

    def end(self, depth: int | None = None) -> None:
        """Switch off, unless somebody else needs it.

        Args:
            depth: How often this thread needs it still; None: once less.
        """
        with self._lock:
            self.on.set(self.on.here - 1 if depth is None else depth)
            if not self.on and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


FORCE_EAGER = _ForceEager()


@contextmanager
def force_eager() -> Iterator[None]:
    """Make compiled functions run eager: a run that only shows shapes compiles nothing."""
    begun = FORCE_EAGER.begin()
    try:
        yield
    finally:
        if begun:
            FORCE_EAGER.end()


class Calls:
    """Counts operations that functions of torch.compile run without being compiled.

    What the compiler made is called by way of a function of Dynamo's own, so that operations of
    it have one more frame of Dynamo's on the stack.

    Args:
        outermost: Identity of the frame to look no further than: by what it was called does not
            count, and the frame is not kept.

    Attributes:
        num_plain: Those so far.
    """

    def __init__(self, outermost: int = 0) -> None:
        self.num_plain: int = 0
        self._outermost = outermost

    def note(self, frame: FrameType | None) -> bool:
        """Note an operation by the frame that called it; return whether it is such a one."""
        while frame is not None and _is_of_dynamo(frame):
            frame = frame.f_back  # around the mode's own handler
        while frame is not None and id(frame) != self._outermost:
            if _is_of_dynamo(frame):
                if frame.f_code.co_name != _WRAPPER:
                    return False
                self.num_plain += 1
                return True
            frame = frame.f_back
        return False


_WRAPPER = "compile_wrapper"


def _is_of_dynamo(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _files_of_dynamo()


@cache
def _files_of_dynamo() -> frozenset[str | None]:
    """Return the files whose functions are around compiled ones and around disabled ones."""
    import torch._compile
    from torch._dynamo import eval_frame

    return frozenset((eval_frame.__file__, torch._compile.__file__))


@contextmanager
def every_size_compiled() -> Iterator[None]:
    """Let Dynamo compile for as many sizes as are warmed up.

    By its own limit (8) a function without dynamic shapes would run eager from the ninth size
    on, with nothing but a line in the log. Every size that is warmed up is one the user asked
    for; the larger limit of all that a function may be compiled for still holds.
    """
    if not dynamo_is_loaded():
        yield
        return
    from torch._dynamo import config

    before = config.recompile_limit
    # Not by config.patch(): it makes a class at each call, which only the collector frees.
    config.recompile_limit = max(before, config.accumulated_recompile_limit)
    try:
        yield
    finally:
        config.recompile_limit = before
