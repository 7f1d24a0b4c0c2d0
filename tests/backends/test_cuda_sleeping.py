"""The build of the allocator of sleeping pools; needs a C compiler, but no device."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch")

from dispatchkit.backends.cuda.sleeping import UnavailableError, build


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
def test_an_empty_variable_selects_cc(monkeypatch, tmp_path) -> None:
    """``CC=`` counts as unset."""
    monkeypatch.setenv("CC", "")
    build(tmp_path / "sleep.so")
    assert (tmp_path / "sleep.so").stat().st_size


@pytest.mark.parametrize(
    ("compiler", "text"),
    [
        ("no-such-compiler -m64", r"'no-such-compiler' cannot be run \(No such file"),
        ("/", r"'/' cannot be run \(Permission denied\); .*set CC to another compiler"),
        ("false", "'false' failed: exit status 1"),
    ],
)
def test_a_compiler_that_does_not_work_is_named(monkeypatch, tmp_path, compiler, text) -> None:
    """Whether it is missing, is not a program, or fails without a message."""
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(UnavailableError, match=text):
        build(tmp_path / "sleep.so")
    assert not [*tmp_path.iterdir()]
