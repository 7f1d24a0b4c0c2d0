"""One schema: the same values and errors in all four places."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.errors import ConfigError, DispatchkitError, UnknownNameError
from dispatchkit.keys import Axis, CUDAGraphMode, DispatchConfig
from dispatchkit.options import RunnerOptions, with_settings
from dispatchkit.settings import SETTINGS, Settings, load_settings, shown

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "DISPATCHKIT_"
LENGTH, KIND = Axis("length", (16, 64)), Axis("kind", (1, 3), exact=True)


def from_python(folder: Path, name: str, value: Any) -> Settings:
    return load_settings({name: value}, environ={}, start=folder)


def from_environment(folder: Path, name: str, value: Any) -> Settings:
    if isinstance(value, list):
        text = ",".join(map(str, value))
    else:
        text = value if isinstance(value, str) else shown(value)
    return load_settings(environ={VARIABLE + name.upper(): text}, start=folder)


def from_file(folder: Path, name: str, value: Any) -> Settings:
    path = folder / "pyproject.toml"
    path.write_text(f"[tool.dispatchkit]\n{json.dumps(name)} = {shown(value)}\n")
    return load_settings(environ={}, start=folder)


PLACES = [from_python, from_environment, from_file]

VALUES: list[tuple[str, Any, Any]] = [
    ("policy", "adaptive", "adaptive"),
    ("mode", "full", CUDAGraphMode.FULL),
    ("sizes", [8, 1, 4], (1, 4, 8)),
    ("max_num_tokens", 64, 64),
    ("max_num_seqs", 8, 8),
    ("query_lens", [1, 4], (1, 4)),
    ("uniform_sizes", [4, 8], (4, 8)),
    ("varlen_decode", True, True),
    ("max_loras", 0, 0),
    ("lazy", False, False),
    ("max_graphs", 0, 0),
    ("eviction", "benefit", "benefit"),
    ("cost_model", "mlp-h100", "mlp-h100"),
    ("axes", "length=16,64; kind=3,1 exact", (LENGTH, KIND)),
    ("plugins", ["vllm", "adaptive"], ("vllm", "adaptive")),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "value", "meant"), VALUES)
def test_a_value_means_the_same_in_every_place(
    place: Any, name: str, value: Any, meant: Any, tmp_path: Path
) -> None:
    """Text or native, a value is the same setting, and its source is reported."""
    settings = place(tmp_path, name, value)
    assert settings[name] == meant
    assert settings.lookup(name).place != "default"


def test_axes_are_a_table_of_buckets_in_the_file(tmp_path: Path) -> None:
    """Native as a table, a plain value or as printed; part of a runner's setup."""
    path = tmp_path / "pyproject.toml"
    table = "length = [64, 16]\nkind = {buckets = [1, 3], exact = true}\n"
    path.write_text(f"[tool.dispatchkit.axes]\n{table}")
    settings = load_settings(environ={}, start=tmp_path, sizes=[1, 2])
    assert settings.dispatch_config().axes == (LENGTH, KIND)
    assert settings.runner_arguments()["options"].config.axes == (LENGTH, KIND)
    said = shown(settings["axes"])
    assert said == "{length = [16, 64], kind = {buckets = [1, 3], exact = true}}"
    path.write_text(f"[tool.dispatchkit]\naxes = {said}\n")
    assert load_settings(environ={}, start=tmp_path)["axes"] == (LENGTH, KIND)
    mixed = {"length": "16,64", "kind": {"buckets": [3, 1], "exact": "yes"}}
    for given_ in ([LENGTH, KIND], mixed):
        assert load_settings(environ={}, axes=given_)["axes"] == (LENGTH, KIND)
    assert load_settings(environ={}, axes={"rows": 7})["axes"] == (Axis("rows", (7,)),)


MISTAKES: list[tuple[str, Any]] = [
    ("polcy", "vllm"),
    ("size", [1, 2]),
    ("mode", "FUL"),
    ("sizes", [4, 0]),
    ("sizes", [4, "x"]),
    ("sizes", [4, 1.5]),
    ("max_num_tokens", 0),
    ("max_num_tokens", -3),
    ("max_num_tokens", 1.5),
    ("max_num_tokens", "many"),
    ("query_lens", [0]),
    ("lazy", "maybe"),
    ("lazy", 3),
    ("eviction", "fifo"),
    ("outputs", "own"),
    ("warmups", -1),
    ("policy_options", "[1"),
    ("axes", "length"),
    ("axes", "length=16; length=64"),
    ("axes", "two words=1"),
    ("axes", "length=16,x"),
    ("axes", "length="),
]


@pytest.mark.parametrize(("name", "value"), MISTAKES)
def test_a_mistake_has_one_text_in_every_place(name: str, value: Any, tmp_path: Path) -> None:
    """Only the note differs, which names the place to correct."""
    texts, notes = [], []
    for place in PLACES:
        folder = tmp_path / place.__name__
        folder.mkdir()
        with pytest.raises(ConfigError) as caught:
            place(folder, name, value)
        texts.append(str(caught.value))
        notes.append(caught.value.__notes__[-1])
    assert texts == [texts[0]] * 3
    assert "the argument" in notes[0]
    assert f"{VARIABLE}{name.upper()}" in notes[1]
    assert "pyproject.toml" in notes[2]


def test_the_nearest_names_are_told() -> None:
    """This holds for names of settings and for values that are names."""
    with pytest.raises(UnknownNameError) as caught:
        load_settings(environ={}, polcy="x")
    assert "policy" in caught.value.nearest
    with pytest.raises(UnknownNameError) as caught:
        load_settings(environ={"DISPATCHKIT_MODE": "full_and_peicewise"})
    assert caught.value.nearest[0] == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"given": 3}, "given must be a dictionary of values by name, or None, got 3"),
        ({"environ": 3}, "environ must be a dictionary of values by name, or None, got 3"),
        ({"sources": 3}, "sources must be a dictionary of values by name, or None, got 3"),
        ({"file": 3}, "file must be the path of a file"),
        ({"start": 3}, "start must be the path of a file"),
    ],
)
def test_sources_of_the_wrong_kind_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(**arguments)


def test_call_wins_over_environment_over_file(tmp_path: Path) -> None:
    """Overridden values are kept with their sources."""
    (tmp_path / "pyproject.toml").write_text('[tool.dispatchkit]\npolicy = "a"\nlazy = true\n')
    environ = {"DISPATCHKIT_POLICY": "b"}
    settings = load_settings(environ=environ, start=tmp_path, policy="c")
    assert [one.value for one in settings.given["policy"]] == ["c", "b", "a"]
    assert settings["lazy"] is True
    assert load_settings(environ=environ, start=tmp_path)["policy"] == "b"
    assert load_settings(environ={}, start=tmp_path)["policy"] == "a"


def test_a_file_further_up_is_found_and_others_are_passed_by(tmp_path: Path) -> None:
    """The nearest file that mentions dispatchkit is used."""
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.dispatchkit]\ncheck = 7\n")
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    settings = load_settings(environ={}, start=deep)
    assert settings["check"] == 7
    assert settings.file == tmp_path / "pyproject.toml"


def test_file_and_environment_that_differ_are_told_and_a_call_is_meant(tmp_path: Path) -> None:
    """One of the two may be a mistake."""
    (tmp_path / "pyproject.toml").write_text('[tool.dispatchkit]\npolicy = "a"\n')
    environ = {"DISPATCHKIT_POLICY": "b"}
    (said,) = load_settings(environ=environ, start=tmp_path).disagreements()
    assert '"b"' in said
    assert '"a"' in said
    assert "DISPATCHKIT_POLICY" in said
    assert load_settings(environ=environ, start=tmp_path, policy="c").disagreements() == ()
    same = {"DISPATCHKIT_POLICY": "a"}
    assert load_settings(environ=same, start=tmp_path).disagreements() == ()


def test_settings_that_contradict_each_other_name_both_sources(tmp_path: Path) -> None:
    """The file has sizes, the environment a limit."""
    (tmp_path / "pyproject.toml").write_text("[tool.dispatchkit]\nsizes = [1, 512]\n")
    settings = load_settings(environ={"DISPATCHKIT_MAX_NUM_TOKENS": "64"}, start=tmp_path)
    with pytest.raises(ConfigError, match="sizes must be at most max_num_tokens") as caught:
        settings.dispatch_config()
    notes = " ".join(caught.value.__notes__)
    assert "pyproject.toml" in notes
    assert "DISPATCHKIT_MAX_NUM_TOKENS" in notes


def test_an_empty_variable_is_as_good_as_none_but_an_empty_list_of_plugins_is_one() -> None:
    """Shells unset a variable for one command this way; no plugins at all is a valid setting."""
    settings = load_settings(environ={"DISPATCHKIT_POLICY": "", "DISPATCHKIT_PLUGINS": ""})
    assert settings["policy"] is None
    assert settings["plugins"] == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tool.dispatchkit\n", "line 1"),
        ("tool = 3\n", "[tool.dispatchkit]"),
        ("[tool]\ndispatchkit = 3\n", "a table"),
        ("", "[tool.dispatchkit]"),
    ],
)
def test_a_file_that_is_named_must_hold_settings(text: str, says: str, tmp_path: Path) -> None:
    """Broken TOML, a wrong table, or no settings of dispatchkit."""
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_settings(environ={}, file=path)
    with pytest.raises(ConfigError, match="No such file") as caught:
        load_settings(environ={"DISPATCHKIT_CONFIG": str(tmp_path / "nowhere.toml")})
    assert caught.value.__notes__ == [
        "The path comes from the environment variable DISPATCHKIT_CONFIG."
    ]


def test_defaults_are_those_of_the_classes_they_are_for() -> None:
    """A setting without a value changes nothing."""
    assert load_settings(environ={}).dispatch_config() == DispatchConfig()
    assert load_settings(environ={}, start="/").runner_arguments() == {}
    config = DispatchConfig()
    for setting in SETTINGS.values():
        if setting.group == "dispatch" and setting.default is not None:
            assert getattr(config, setting.name) == setting.default


def test_runner_arguments_make_a_runner() -> None:
    """Arguments have names, and defaults are the runner's own."""
    pytest.importorskip("torch")
    import inspect

    from dispatchkit import GraphRunner

    known = inspect.signature(GraphRunner.__init__).parameters
    defaults = RunnerOptions()
    for setting in SETTINGS.values():
        if setting.group == "runner" and setting.name in known:
            default = known[setting.name].default
            assert default == setting.default or (default is None and not setting.default)
        elif setting.group == "runner":
            assert with_settings(defaults, {setting.name: setting.default}) == defaults
    arguments = load_settings(environ={}, lazy=True, max_num_tokens=8).runner_arguments()
    assert arguments == {
        "lazy": True,
        "options": RunnerOptions(config=DispatchConfig(max_num_tokens=8)),
    }


def test_every_variable_that_the_code_reads_is_known() -> None:
    """A variable that is not a setting would be rejected as misspelled."""
    known = {setting.variable for setting in SETTINGS.values()}
    known |= {"DISPATCHKIT_CONFIG", "DISPATCHKIT_REQUIRE_GPU", "DISPATCHKIT_SLEEP_LIBRARY"}
    known |= {"DISPATCHKIT_TRACE", "DISPATCHKIT_METRICS"}  # read inside vLLM
    read = set()
    for folder in ("dispatchkit", "plugins"):
        for path in (ROOT / folder).glob("**/*.py"):
            if "tests" not in path.relative_to(ROOT).parts:
                text = path.read_text(encoding="utf-8")
                read |= set(re.findall(r"\"(DISPATCHKIT_[A-Z_]+)\"", text))
    assert "DISPATCHKIT_PLUGINS" in read
    assert read <= known | {VARIABLE}


def test_every_setting_is_in_the_reference() -> None:
    """Each has its default and its description."""
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    for setting in SETTINGS.values():
        default = f"`{shown(setting.default)}`" if setting.default is not None else setting.derived
        assert f"| `{setting.name}` | {default} | {setting.help} |" in page


names = st.one_of(
    st.sampled_from([*SETTINGS, "polcy", "sizes", "Mode", ""]), st.text(string.ascii_letters)
)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**20), 10**20),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["1,2,4", "FULL", "vllm", "true", "{}", "0", "-1", "1e3", "\u0663"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.dictionaries(names, values, max_size=4), st.booleans())
def test_whatever_is_given_is_taken_or_refused_with_a_message(
    given_: dict[str, Any], by_environment: bool
) -> None:
    """There is no other error, and accepted values can be printed."""
    try:
        if by_environment:
            environ = {
                VARIABLE + name.upper(): str(value).replace("\0", "")
                for name, value in given_.items()
            }
            settings = load_settings(environ=environ, start="/")
        else:
            settings = load_settings(given_, environ={}, start="/")
        settings.dispatch_config()
        json.dumps([row["setting"] for row in settings.rows()])
        assert all(shown(settings[name]) for name in SETTINGS)
    except DispatchkitError as error:
        said = str(error)
    else:
        said = "taken"
    assert said
