"""Cost models: interpolation, files, and refused values."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.errors import ConfigError, UnknownNameError

from dispatchkit_plan.costs import (
    BUILTIN_COST_MODELS,
    CostModel,
    Curve,
    load_cost_model,
    save_cost_model,
)

curves = st.dictionaries(st.integers(1, 10_000), st.floats(0, 1e9), min_size=1, max_size=5).map(
    lambda points: sorted(points.items())
)


@given(points=curves, at=st.integers(0, 20_000))
def test_a_curve_stays_between_its_points(points, at):
    """It passes through every point, stays between neighbours, and never falls after the last."""
    curve = Curve(tuple(points))
    for size, value in points:
        assert curve(size) == pytest.approx(value)
    low, high = min(v for _, v in points), max(v for _, v in points)
    if at <= curve.last:
        assert low - 1e-6 <= curve(at) <= high * (1 + 1e-9) + 1e-6
    else:
        assert curve(at) >= points[-1][1] - 1e-6
    assert curve.table(3) == [curve(n) for n in range(4)]


def test_between_points_lies_a_straight_line():
    curve = Curve(((10, 100.0), (20, 200.0)))
    assert [curve(n) for n in (1, 10, 15, 20, 30)] == [100.0, 100.0, 150.0, 200.0, 300.0]
    assert Curve(((10, 200.0), (20, 100.0)))(99) == 100.0


@given(eager=curves, graph=curves)
def test_a_model_survives_its_file(eager, graph, tmp_path_factory):
    model = CostModel(name="drawn", eager_us=eager, graph_us=graph, graph_bytes=graph, source="x")
    path = tmp_path_factory.mktemp("model") / "model.json"
    save_cost_model(model, path)
    assert load_cost_model(path) == model


def test_built_in_models_name_their_source():
    """Their points are measured."""
    assert set(BUILTIN_COST_MODELS) == {"lm-decode-h100", "mlp-h100"}
    for name, model in BUILTIN_COST_MODELS.items():
        assert load_cost_model(name) is model
        assert "H100" in model.source
        assert CostModel.from_json(model.to_json()) == model
    decode = BUILTIN_COST_MODELS["lm-decode-h100"]
    assert (decode.eager_us(64), decode.graph_us(64)) == (6489.0, 1942.0)
    assert decode.step_us(60, 64) == 1942.0
    assert decode.step_us(60, None) == decode.eager_us(60)
    assert decode.covers(512)
    assert not decode.covers(513)
    mlp = BUILTIN_COST_MODELS["mlp-h100"]
    assert mlp.step_us(1025, 2048) == 4890.0
    assert mlp.step_us(1025, 2048, best=True) == 2507.0


GOOD = BUILTIN_COST_MODELS["mlp-h100"].to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format must be 'dispatchkit-cost-model'"),
        ({"version": 2}, "version must be 1"),
        ({"eager_us": None}, "eager_us"),
        ({"eager_us": []}, "eager_us"),
        ({"eager_us": [[1]]}, "eager_us"),
        ({"eager_us": [[0, 1.0]]}, "eager_us"),
        ({"eager_us": [[1.5, 1.0]]}, "eager_us"),
        ({"eager_us": [[1, -1.0]]}, "eager_us"),
        ({"eager_us": [[1, float("nan")]]}, "eager_us"),
        ({"eager_us": [[1, "fast"]]}, "eager_us"),
        ({"eager_us": [[1, 1.0], [1, 2.0]]}, "several values for 1 token. Keep one"),
        ({"eager_us": [[1, 1e20]]}, r"a number from 0 to 2\*\*53"),
        ({"eager_us": 7}, "eager_us"),
        ({"name": 7}, "name must be a string"),
        ({"source": 7}, "source must be a string"),
        ({"axis": "length"}, "axis 'length' has no curves"),
        ({"graph_ms": []}, "graph_us"),
    ],
)
def test_a_bad_file_is_named(change, message, tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        load_cost_model(path)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert str(path) in str(caught.value) + notes


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="lm-decode-h100"):
        load_cost_model("lm-decode-h10")
    with pytest.raises(ConfigError, match="cost model must be the path of a file"):
        load_cost_model(3)
    with pytest.raises(ConfigError, match=r"a dispatchkit_plan.CostModel, got 3"):
        save_cost_model(3, tmp_path / "model.json")
    path = tmp_path / "model.json"
    for text, message in [
        ("{", "JSON"),
        ("[1]", "must contain a JSON object, got a value of type list"),
        ("{}", "format"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_cost_model(path)
    lacking = {key: value for key, value in GOOD.items() if key != "graph_us"}
    path.write_text(json.dumps(lacking))
    with pytest.raises(ConfigError, match="graph_us"):
        load_cost_model(path)


def test_pieces_have_times_of_their_own_where_they_were_measured():
    model = CostModel(
        name="both", eager_us=[(1, 9.0)], graph_us=[(8, 2.0)], piecewise_us=[(8, 5.0)], clock="host"
    )
    assert model.step_us(3, 8) == 2.0
    assert model.step_us(3, 8, piecewise=True) == 5.0
    assert CostModel.from_json(model.to_json()) == model
    whole = CostModel(name="whole", eager_us=[(1, 9.0)], graph_us=[(8, 2.0)])
    assert whole.step_us(3, 8, piecewise=True) == 2.0
    with pytest.raises(ConfigError, match="clock"):
        CostModel.from_json(model.to_json() | {"clock": "sundial"})


@pytest.mark.parametrize("points", [[(1, 10**400)], [(10**400, 1.0)]], ids=["value", "size"])
def test_a_number_of_hundreds_of_digits_is_refused(points):
    with pytest.raises(ConfigError, match="eager_us"):
        CostModel(name="x", eager_us=points, graph_us=[(1, 1.0)])


def test_a_model_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "costs.json").mkdir()
    with pytest.raises(ConfigError, match=r"not a folder, got .*costs\.json"):
        save_cost_model(BUILTIN_COST_MODELS["mlp-h100"], tmp_path / "costs.json")
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]
