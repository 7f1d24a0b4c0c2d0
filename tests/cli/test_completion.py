"""Shell completion of commands and of values of settings."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("dispatchkit sim", {"simulate"}),
        ("dispatchkit config s", {"show"}),
        ("dispatchkit explain --policy vllm@0.1", {"vllm@0.11", "vllm@0.11.1", "vllm@0.13"}),
        ("dispatchkit explain --mode full_d", {"full_decode_only"}),
        ("dispatchkit simulate --cost-model lm", {"lm-decode-h100"}),
    ],
)
def test_what_may_follow_is_offered(
    run: Any, monkeypatch: pytest.MonkeyPatch, line: str, offers: set[str]
) -> None:
    """The request has the form that bash sends."""
    monkeypatch.setenv("_DISPATCHKIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    done = run()
    assert done.err == ""
    assert set(done.out.split()) == offers
