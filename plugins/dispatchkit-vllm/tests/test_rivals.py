"""The published dispatchers compared with the facades; ``make rivals`` fetches them."""

from __future__ import annotations

import ast
import gzip
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm_test_helpers import vllm_config
from vllm_test_rivals import RELEASES, is_fetched, loaded, runner_tree

from dispatchkit_vllm import engine
from dispatchkit_vllm.facade import v0_13, v0_33

DATA = Path(__file__).parent / "data"
VECTORS = {"0.33.0": "vllm-newest", "0.13.0": "vllm-0.13"}
FACADES = {"0.33.0": v0_33, "0.13.0": v0_13}

pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.keys.CaptureSizeWarning")


@pytest.fixture(params=RELEASES)
def release(request) -> str:
    if not is_fetched(request.param):
        pytest.skip("the published dispatchers are not here; fetch them with `make rivals`")
    return request.param


def configurations(release: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"{VECTORS[release]}.jsonl.gz", "rt") as lines:
        found = [json.loads(line) for line in lines]
    return [
        {**each["cfg"], "sizes": each["final_sizes"]} for each in found if "final_sizes" in each
    ]


def config_of(cfg: dict[str, Any], mode_type: Any) -> Any:
    config = vllm_config(
        cfg["sizes"],
        mode=cfg["mode"],
        config_mode=cfg["config_mode"],
        piecewise=cfg["piecewise_compiled"],
        max_num_seqs=cfg["max_num_seqs"],
        query_len=cfg["query_len"],
        max_loras=(cfg.get("max_loras") or 1) if cfg["lora"] else 0,
        specialize_lora=cfg["specialize_lora"],
        specialize_active_lora=cfg.get("specialize_active_lora", False),
        compile_sizes=cfg.get("compile_sizes"),
    )
    compilation = config.compilation_config
    compilation.cudagraph_mode = mode_type[cfg["config_mode"]]
    compilation.mode = compilation.splitting_ops = None
    config.pad_for_cudagraph = lambda n: compilation.bs_to_padded_graph_size[n]
    return config


def result(call: Any) -> Any:
    """Return a call's result as plain values, or the class of its exception."""
    try:
        answer = call()
    except Exception as error:  # noqa: BLE001 - any exception is a result to compare
        return type(error).__name__
    return None if answer is None else (answer[0].name, plain(answer[1]))


def plain(descriptor: Any) -> tuple[Any, ...]:
    names = getattr(descriptor, "_fields", None) or descriptor.__dataclass_fields__
    return tuple(getattr(descriptor, name) for name in names)


def keys(dispatcher: Any) -> dict[str, set[Any]]:
    return {
        mode.name: {plain(each) for each in found}
        for mode, found in dispatcher.cudagraph_keys.items()
    }


def batches(cfg: dict[str, Any]) -> list[int]:
    edges = {0, 1, -1, cfg["max_num_seqs"] * cfg["query_len"]}
    for size in cfg["sizes"][:: max(1, len(cfg["sizes"]) // 6)]:
        edges |= {size - 1, size, size + 1}
    return sorted(edges)


def test_the_facade_answers_as_the_published_class(release):
    compared = 0
    with loaded(release) as module:
        for cfg in configurations(release):
            dispatchers = []
            for each in (module.CudagraphDispatcher, FACADES[release].CudagraphDispatcher):
                made: list[Any] = []
                config = config_of(cfg, module.CUDAGraphMode)
                outcome = result(lambda: made.append(each(config)))  # noqa: B023
                dispatchers.append((outcome, made))
            (theirs_outcome, theirs), (ours_outcome, ours) = dispatchers
            assert ours_outcome == theirs_outcome, cfg
            if not theirs:
                continue
            if cfg["initialize"]:
                length = cfg["init_query_len"]
                outcomes = [
                    result(lambda: d.initialize_cudagraph_keys(m[cfg["mode"]], length))  # noqa: B023
                    for d, m in (
                        (theirs[0], module.CUDAGraphMode),
                        (ours[0], FACADES[release].CUDAGraphMode),
                    )
                ]
                assert outcomes[0] == outcomes[1], cfg
            assert keys(ours[0]) == keys(theirs[0]), cfg
            compared += compare_batches(theirs[0], ours[0], cfg, release)
    assert compared > 5000


def compare_batches(theirs: Any, ours: Any, cfg: dict[str, Any], release: str) -> int:
    compared = 0
    counts = [0, 1, 3] if cfg["lora"] else [0]
    for n, uniform, loras in itertools.product(batches(cfg), (False, True), counts):
        variants: list[dict[str, Any]] = [{}]
        if release == "0.33.0":
            variants = [{"num_active_loras": loras}, {"num_active_loras": 0}]
        else:
            variants += [{"disable_full": True}]
        for options in variants:
            expected = result(lambda: theirs.dispatch(n, uniform, loras > 0, **options))  # noqa: B023
            got = result(lambda: ours.dispatch(n, uniform, loras > 0, **options))  # noqa: B023
            assert got == expected, (cfg, n, uniform, loras, options)
            compared += 1
    return compared


def test_capture_order_is_that_of_the_published_class():
    if not is_fetched("0.33.0"):
        pytest.skip("the published dispatchers are not here; fetch them with `make rivals`")
    with loaded("0.33.0") as module:
        for cfg in configurations("0.33.0"):
            if not cfg["initialize"] or cfg["mode"] == "NONE":
                continue
            orders = []
            for owner in (module, v0_33):
                config = config_of(cfg, module.CUDAGraphMode)
                try:
                    dispatcher = owner.CudagraphDispatcher(config)
                    dispatcher.initialize_cudagraph_keys(
                        owner.CUDAGraphMode[cfg["mode"]], cfg["init_query_len"]
                    )
                except (AssertionError, ValueError) as error:
                    orders.append(type(error))
                    continue
                orders.append(
                    [(m.name, [plain(d) for d in ds]) for m, ds in dispatcher.get_capture_descs()]
                )
            assert orders[0] == orders[1], cfg


def test_the_swap_lands_where_the_runner_looks(release, monkeypatch):
    """The runner looks the class up in its own module."""
    tree = runner_tree(release)
    imported = [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == engine._MODULE
        for alias in node.names
    ]
    assert imported == [engine.DISPATCHER]
    built = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == engine.DISPATCHER
    ]
    assert len(built) == 1
    assert [ast.unparse(argument) for argument in built[0].args] == ["self.vllm_config"]

    with loaded(release) as module:
        # The runner's own import statement and call, in a module of its name.
        runner = ModuleType("vllm.v1.worker.gpu_model_runner")
        statement = next(
            node
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module == engine._MODULE
        )
        exec(compile(ast.Module([statement], []), "runner", "exec"), vars(runner))  # noqa: S102
        monkeypatch.setitem(sys.modules, runner.__name__, runner)
        original = runner.CudagraphDispatcher
        monkeypatch.setenv(engine.VARIABLE, "vllm@0.13")
        engine.install()
        vars(runner)["self"] = type(
            "Runner",
            (),
            {"vllm_config": config_of(configurations(release)[5], module.CUDAGraphMode)},
        )
        call = compile(ast.Expression(built[0]), "runner", "eval")
        dispatcher = eval(call, vars(runner))  # noqa: S307 - the runner's own expression
        assert type(dispatcher) is not original
        assert dispatcher.replaces is original
        assert set(dispatcher.cudagraph_keys) == {
            module.CUDAGraphMode.PIECEWISE,
            module.CUDAGraphMode.FULL,
        }
        engine.uninstall()
        assert runner.CudagraphDispatcher is original


def test_the_published_class_s_modes_and_descriptors_come_back(release, monkeypatch):
    with loaded(release) as module:
        monkeypatch.setenv(engine.VARIABLE, "vllm")
        engine.install()
        mode = module.CUDAGraphMode.FULL_AND_PIECEWISE
        config = vllm_config()
        config.compilation_config.cudagraph_mode = mode
        dispatcher = module.CudagraphDispatcher(config)
        dispatcher.initialize_cudagraph_keys(mode, 1)
        answer = dispatcher.dispatch(3, True, False)
        assert answer[0] is module.CUDAGraphMode.FULL
        assert type(answer[1]) is module.BatchDescriptor
        engine.uninstall()
