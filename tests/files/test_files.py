"""Output files are complete or absent, and never replace inputs or other files by mistake."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dispatchkit.errors import ConfigError
from dispatchkit.files import check_output, whole_file, write_whole
from dispatchkit.observe import TraceWriter, read_trace


def hard_link(source: Path, other: Path) -> Path:
    other.hardlink_to(source)
    return other


def link(source: Path, other: Path) -> Path:
    other.symlink_to(source)
    return other


def through_a_linked_folder(source: Path, other: Path) -> Path:
    other.symlink_to(source.parent, target_is_directory=True)
    return other / source.name


def with_dots(source: Path, other: Path) -> Path:
    other.mkdir()
    return other / ".." / source.name


@pytest.mark.parametrize(
    "as_another_name",
    [lambda source, _: source, hard_link, link, through_a_linked_folder, with_dots],
)
def test_an_input_is_no_output_under_any_name(tmp_path: Path, as_another_name: Any) -> None:
    """This holds with force too."""
    source = tmp_path / "in.csv"
    source.write_text("mine")
    output = as_another_name(source, tmp_path / "other")
    with pytest.raises(ConfigError, match="a file other than the input"):
        check_output(output, inputs=[None, tmp_path / "absent", source], overwrite=True)


def test_a_relative_name_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.csv").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a file other than the input"):
        check_output("in.csv", inputs=[tmp_path / "in.csv"])


@pytest.mark.parametrize("path", [3, None, b"out", ["out"]])
@pytest.mark.parametrize(
    ("take", "setting"),
    [
        (check_output, "output"),
        (lambda path: write_whole(path, "x"), "output"),
        (TraceWriter, "trace"),
        (read_trace, "trace"),
    ],
)
def test_what_is_no_path_is_refused(take: Any, setting: str, path: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be the path of a file, as text or a"):
        take(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("folder", "a file, not a folder"),
        ("absent/out", "in an existing folder"),
        ("file/out", "cannot be written"),
        ("file", "already exists"),
        ("dangling", "in an existing folder"),
        ("loop", "cannot be written"),
        ("n" * 300, "cannot be written"),
        ("a\0b", "cannot be written"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "out")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=says) as caught:
        check_output(tmp_path / name, overwrite=False)
    assert len(str(caught.value)) < 500
    if name != "file":
        with pytest.raises(ConfigError):
            write_whole(tmp_path / name, "new")
    assert (tmp_path / "file").read_text() == "old"
    assert list(tmp_path.glob("**/*.part")) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError(28, "full")])
def test_what_interrupts_leaves_the_older_file(tmp_path: Path, error: Any) -> None:
    """No other file remains."""
    path = tmp_path / "out"
    path.write_text("old")
    expected = ConfigError if isinstance(error, OSError) else error
    with pytest.raises(expected), whole_file(path) as stream:  # noqa: PT012
        stream.write(b"half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    target, name = tmp_path / "real", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    name.symlink_to(target)
    write_whole(name, "new")
    assert name.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_the_part_of_another_writer_stays(tmp_path: Path) -> None:
    """The other writer was killed or is still writing."""
    path = tmp_path / "out"
    left = tmp_path / "out.part"
    left.write_text("of another")
    with whole_file(path) as stream, whole_file(path) as other:
        stream.write(b"first")
        other.write(b"second")
    assert path.read_text() == "first"
    assert left.read_text() == "of another"
    assert sorted(tmp_path.iterdir()) == [path, left]


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="needs a null device")
def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "sink"
    link.symlink_to("/dev/null")
    check_output(link, overwrite=False)
    write_whole(link, "gone")
    assert Path("/dev/null").is_char_device()


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(path, "through it")
        assert os.read(reader, 100) == b"through it"
    finally:
        os.close(reader)
    assert path.is_fifo()


def test_a_long_name_is_written_as_well_as_a_short_one(tmp_path: Path) -> None:
    """The part's suffix needs room in the name."""
    path = tmp_path / ("n" * 254)
    write_whole(path, "text")
    assert path.read_text() == "text"


def test_text_that_is_no_utf8_is_escaped(tmp_path: Path) -> None:
    """A file name may contain any bytes, and a report may contain the name."""
    write_whole(tmp_path / "out", "name \udcff")
    assert (tmp_path / "out").read_text() == "name \\udcff"
