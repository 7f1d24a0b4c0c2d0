"""A watched settings file: valid settings are swapped in, invalid ones are refused."""

from __future__ import annotations

import os
import threading

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.errors import ConfigError  # noqa: E402
from dispatchkit.execute import ConfigWatcher, SwapWarning  # noqa: E402


@pytest.fixture
def runner(make_runner):
    made = make_runner(lambda tokens: tokens * 2, policy="vllm")
    made.capture()
    return made


@pytest.fixture
def write(tmp_path):
    """Return a function that writes the settings to the file, as a new file each time."""
    path = tmp_path / "serving.toml"

    def write(text):
        part = tmp_path / "part"
        part.write_text(f"[tool.dispatchkit]\n{text}\n")
        part.replace(path)
        # Independent of the file system's clock resolution.
        write.number += 1
        os.utime(path, ns=(write.number, write.number))
        return path

    write.number = 0
    return write


def test_what_the_file_says_is_swapped_in_once(runner, write):
    watcher = ConfigWatcher(runner, write('policy = "vllm"\nsizes = [1, 2, 4, 8]'))
    assert watcher.poll() is None
    write("sizes = [3, 8]\nmax_graphs = 5")
    report = watcher.poll()
    assert [key.num_tokens for key in report.added] == [3]
    assert runner.config.sizes == (3, 8)
    assert runner.lanes[0].lifecycle.budget.max_graphs == 5
    assert watcher.poll() is None
    assert runner.dispatcher.epoch == 1


def test_policy_and_options_come_from_the_file(runner, write):
    watcher = ConfigWatcher(
        runner, write('policy = "threshold"\npolicy_options = { max_tokens = 4 }')
    )
    watcher.poll()
    assert runner.dispatcher.policy_name == "threshold"
    assert runner.dispatcher.dispatch(3).key.num_tokens == 4
    assert runner.dispatcher.dispatch(7).key is None
    write('policy = "threshold"\npolicy_options = { max_tokens = 8 }')
    watcher.poll()
    assert runner.dispatcher.dispatch(7).key.num_tokens == 8
    write('policy = "vllm"')
    assert watcher.poll().previous == "threshold"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sizes = [1, 2", "TOML"),
        ("capture_size = [1, 2]", "sizes"),
        ("sizes = [0]", "sizes"),
        ('policy = "nobody"', "policy"),
        ('outputs = "view"', "Restore the value in the file, or create a new runner"),
        ('backend = "cuda"', "Restore the value in the file, or create a new runner"),
        ("sizes = [3, 16]\nmax_num_tokens = 16", "buffer_rows"),
    ],
)
def test_a_file_that_cannot_be_followed_is_told_of_once(runner, write, text, why):
    watcher = ConfigWatcher(runner, write("max_graphs = 9"))
    watcher.poll()
    write(text)
    with pytest.warns(SwapWarning, match="the runner is unchanged") as told:
        assert watcher.poll() is None
    assert why in str(told[0].message)
    assert why in str(watcher.error)
    assert watcher.poll() is None  # a second warning would be an error here
    assert runner.dispatcher.epoch == 0
    assert torch.equal(runner(torch.arange(3)), torch.arange(3) * 2)
    write("max_graphs = 8")
    watcher.poll()
    assert watcher.error is None
    assert runner.lanes[0].lifecycle.budget.max_graphs == 8


def test_a_file_that_is_missing_is_told_of(runner, tmp_path):
    watcher = ConfigWatcher(runner, tmp_path / "nowhere.toml")
    with pytest.warns(SwapWarning, match=r"nowhere\.toml"):
        watcher.poll()


def test_it_watches_a_path_for_a_runner(runner):
    with pytest.raises(ConfigError, match="runner must be a GraphRunner, got 3"):
        ConfigWatcher(3, "settings.toml")
    with pytest.raises(ConfigError, match="path must be the path of a file"):
        ConfigWatcher(runner, 3)


def test_it_can_be_given_a_thread(runner, write):
    watcher = ConfigWatcher(runner, write("sizes = [3, 8]"))
    stop, swapped = threading.Event(), threading.Event()
    poll = watcher.poll

    def telling():
        if poll() is not None:
            swapped.set()

    watcher.poll = telling
    thread = threading.Thread(target=watcher.run, args=(stop, 0.001))
    thread.start()
    try:
        assert swapped.wait(timeout=60)
    finally:
        stop.set()
        thread.join(timeout=60)
    assert runner.config.sizes == (3, 8)
