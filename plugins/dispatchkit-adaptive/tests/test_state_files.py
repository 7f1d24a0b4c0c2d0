"""State files: invalid contents and paths neither stop learning nor lose data."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit import DispatchConfig, Dispatcher, Outcome, load_plugins
from dispatchkit.errors import ConfigError

from dispatchkit_adaptive import AdaptivePolicy, StateError
from dispatchkit_adaptive import state as state_module

PLUGINS = load_plugins(allow=["adaptive", "vllm"])
CONFIG = DispatchConfig(sizes=[4, 8])


def learnt(steps: int = 40) -> AdaptivePolicy:
    """Return a policy with some measured steps."""
    policy = AdaptivePolicy(plugins=PLUGINS)
    use(policy, steps)
    return policy


def use(policy: AdaptivePolicy, steps: int = 40) -> None:
    dispatcher = Dispatcher(policy, CONFIG, lazy=True)
    for step in range(steps):
        tokens = step % 8 + 1
        decision = dispatcher.dispatch(tokens, tokens, step % 2)
        batch = dispatcher.batch(tokens, tokens, step % 2)
        dispatcher.observe(Outcome(batch, decision, 100.0 + tokens, step=step + 1))
    policy.explain()


def write(path: Path, body: dict[str, Any]) -> None:
    """Write a state file with a valid digest."""
    digest = state_module._digest(body)
    whole = {
        "format": state_module.FORMAT,
        "version": state_module.VERSION,
        "digest": digest,
        **body,
    }
    path.write_text(json.dumps({**whole, **body}))


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = learnt().save(tmp_path_factory.mktemp("state") / "state.json")
    data = json.loads(path.read_text())
    return {"fingerprint": data["fingerprint"], "arms": data["arms"]}


numbers = st.sampled_from([10**400, -(10**400), 1e308, 5e-324, 0, -1, 2.5, True, 2**63, 10**15])
odd = st.one_of(
    numbers,
    st.sampled_from([float("nan"), float("inf"), None, "", "4", "FULL", [], {}, [[4, 1]], [None]]),
)


@given(st.data())
def test_whatever_an_arm_has_learning_goes_on(
    body: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """A valid digest does not imply valid contents."""
    changed = copy.deepcopy(body)
    arm = changed["arms"][data.draw(st.integers(0, len(changed["arms"]) - 1))]
    name = data.draw(st.sampled_from(sorted(arm)))
    if name != "clock" and isinstance(arm[name], dict):
        inner = data.draw(st.sampled_from(sorted(arm[name])))
        arm[name][inner] = data.draw(odd)
    else:
        arm[name] = data.draw(odd)
    path = tmp_path_factory.mktemp("odd") / "state.json"
    write(path, changed)
    policy = AdaptivePolicy(plugins=PLUGINS)
    refused = ""
    try:
        policy.load(path)
    except StateError as error:
        refused = str(error)
    assert not refused or refused.startswith(str(path))
    assert len(refused) < 600
    use(policy)
    policy.save(path)
    AdaptivePolicy(plugins=PLUGINS).load(path)


def test_a_file_above_the_limit_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = learnt().save(tmp_path / "state.json")
    monkeypatch.setattr(state_module, "_MAX_BYTES", 1000)
    with pytest.raises(StateError, match=r"is larger than 1,000 bytes"):
        AdaptivePolicy(plugins=PLUGINS).load(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_missing_folder(path: Path) -> None:
    path.symlink_to(path.parent / "gone" / "state.json")


@pytest.mark.parametrize("make", [a_folder, a_loop, a_missing_folder])
def test_a_file_that_cannot_be_used_stops_no_program(tmp_path: Path, make: Any) -> None:
    """Reading it warns, and saving raises a typed error and leaves no temporary file."""
    path = tmp_path / "state.json"
    make(path)
    if make is a_missing_folder:
        policy = AdaptivePolicy(state=path, plugins=PLUGINS)
    else:
        with pytest.warns(RuntimeWarning, match="Learning starts from scratch"):
            policy = AdaptivePolicy(state=path, plugins=PLUGINS)
    use(policy)
    with pytest.raises(ConfigError, match=r"[Oo]utput"):
        policy.save()
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


def test_a_state_file_stays_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later change of the working directory has no effect."""
    monkeypatch.chdir(tmp_path)
    policy = AdaptivePolicy(state="state.json", plugins=PLUGINS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    use(policy)
    assert policy.save() == tmp_path / "state.json"
    assert list((tmp_path / "elsewhere").iterdir()) == []
