"""The runner for its users: sizes, results, reasons, statistics."""

from __future__ import annotations

from unittest.mock import Mock

import attrs
import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    BufferOptions,
    DispatchConfig,
    GraphRunner,
    Reason,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.errors import (  # noqa: E402
    ConfigError,
    DescriptorError,
    NoGraphError,
    UnknownNameError,
)
from dispatchkit.execute import EagerStepWarning, ModeDowngradeWarning  # noqa: E402
from dispatchkit.execute.step.reasons import DOWNGRADES, NEXT_STEPS  # noqa: E402
from dispatchkit.keys import AttentionSupport, CaptureSizeWarning, CUDAGraphMode  # noqa: E402

TWO = {
    "tokens": StaticInput((None,), "int64"),
    "positions": StaticInput((None,), "int64"),
}


@pytest.fixture
def model():
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(50, 8, generator=generator)
    weight = torch.randn(8, 8, generator=generator)

    def step(tokens, positions):
        hidden = table[tokens] + positions[:, None]
        return {"hidden": torch.relu(hidden @ weight), "pair": (hidden.sum(-1), tokens * 2)}

    return step


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed * 100 + rows)
    return {
        "tokens": torch.randint(0, 50, (rows,), generator=generator),
        "positions": torch.arange(rows),
    }


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected)


def test_every_size_gives_what_eager_gives(make_runner, model):
    """One row less, equal and one row more than each size, with nested outputs."""
    runner = make_runner(model, TWO)
    report = runner.capture()
    assert report.num_graphs == 4
    assert report.failed == {}
    for seed, rows in enumerate((8, 3, 1, 2, 4, 5, 7, 6, 8, 1)):
        given = batch(rows, seed)
        assert_same(runner(**given), model(**given))
    stats = runner.stats()
    assert stats.steps_by_mode == {"NONE": 0, "PIECEWISE": 0, "FULL": 10}
    assert stats.real_tokens == 45
    assert stats.padded_tokens == 8 + 4 + 1 + 2 + 4 + 8 + 8 + 8 + 8 + 1


def test_inputs_by_position_and_by_name_are_the_same(make_runner, model):
    runner = make_runner(model, TWO)
    runner.capture()
    given = batch(3)
    assert_same(runner(given["tokens"], given["positions"]), model(**given))
    assert_same(runner(given["tokens"], positions=given["positions"]), model(**given))


def test_example_declares_inputs(make_runner):
    """Dimension 0 of the first example is the batch; examples with another size are not batched."""
    scale = torch.tensor([2.0])
    runner = make_runner(
        lambda x, scale: x * scale, example={"x": torch.ones(5, 3), "scale": scale}
    )
    runner.capture()
    x = torch.randn(3, 3)
    assert_same(runner(x=x, scale=scale * 3), x * 6)
    assert runner.stats().hits == {"FULL tokens=4": 1}


def test_empty_batch_runs_eager_and_is_counted(make_runner, model):
    runner = make_runner(model, TWO)
    runner.capture()
    given = batch(0)
    assert_same(runner(**given), model(**given))
    assert runner.stats().eager_by_reason == {"empty_batch": 1}


def test_batch_above_the_limit_is_refused(make_runner, model):
    runner = make_runner(model, TWO, max_num_tokens=8)
    runner.capture()
    with pytest.raises(DescriptorError) as caught:
        runner(**batch(9))
    assert (caught.value.field, caught.value.value) == ("num_tokens", 9)
    assert runner.stats().steps == 0


def test_batch_above_the_last_size_runs_eager_though_the_limit_is_higher(make_runner, model):
    """No size is added to an explicit list."""
    with pytest.warns(CaptureSizeWarning):
        runner = make_runner(model, TWO, max_num_tokens=20)
    runner.capture()
    given = batch(9)
    with pytest.warns(EagerStepWarning, match="above_largest_size"):
        result = runner(**given)
    assert_same(result, model(**given))
    assert runner.stats().eager_by_reason == {"above_largest_size": 1}


def test_each_downgrade_warns_once_and_is_counted_each_time(make_runner, model):
    runner = make_runner(model, TWO)
    with pytest.warns(EagerStepWarning, match="not_captured"):
        runner(**batch(3))
    for _ in range(2):
        runner(**batch(3))  # a second warning would be an error here
    assert runner.stats().eager_by_reason == {"not_captured": 3}


def test_each_downgrade_says_the_next_step(make_runner, model, backend, monkeypatch):
    """Warnings and a strict runner's errors must name the next step for newcomers."""
    chosen = {Reason.DISABLED, Reason.CAPTURE_PENDING, Reason.MODE_NONE}  # explained, not warned of
    assert set(NEXT_STEPS) == DOWNGRADES | chosen
    with pytest.warns(EagerStepWarning, match=r"Call runner.capture\(\), or .*lazy=True"):
        make_runner(model, TWO)(**batch(3))
    monkeypatch.setattr(backend, "capture_segments", None)
    with pytest.raises(NoGraphError, match="Create the runner with mode='FULL'"):
        make_runner(model, TWO, mode="PIECEWISE", options=RunnerOptions(strict=True))(**batch(3))


def test_batch_above_the_limit_says_how_to_raise_it(make_runner, model):
    with pytest.raises(DescriptorError, match="Raise max_num_tokens for larger batches"):
        make_runner(model, TWO, max_num_tokens=8)(**batch(9))


def test_report_of_a_capture_reads_well(make_runner):
    """If many keys fail for one reason, one of them is named with it."""
    runner = make_runner(lambda tokens: {tokens}, sizes=[4, 8])
    words = str(runner.capture())
    assert words.startswith("0 graphs captured in ")
    assert "2 keys failed, first FULL tokens=8: output_layout: Output 0 is {tensor(" in words
    assert "Return a tensor, a value that is equal in each run, or an object with tensor" in words


def test_strict_runner_raises_before_the_step_runs(make_runner):
    """A downgrade is counted with a warning, or raises if the runner is strict."""
    ran = Mock()

    def step(tokens):
        ran()
        return tokens

    runner = make_runner(step, options=RunnerOptions(strict=True))
    runner.capture([key for key in runner.registry if key.num_tokens == 8])
    runner(torch.arange(8))
    runner.lanes[0].lifecycle.evict(next(iter(runner.lanes[0].lifecycle.live())))
    runner.capture([key for key in runner.registry if key.num_tokens == 4])
    ran.reset_mock()
    with pytest.raises(NoGraphError, match="FULL tokens=4") as caught:
        runner(torch.arange(7))
    assert caught.value.reason == "evicted"
    ran.assert_not_called()


def test_a_runner_made_strict_by_a_freeze_says_how_to_relax_it(make_runner):
    """The options cannot be changed any more, and may never have been strict."""
    runner = make_runner(lambda tokens: tokens, options=RunnerOptions(strict=True))
    with pytest.raises(NoGraphError, match=r"eager, set RunnerOptions\(strict=False\)\."):
        runner(torch.arange(4))
    runner.freeze(strict=True)
    with pytest.raises(NoGraphError, match=r"eager, call freeze\(strict=False\)\."):
        runner(torch.arange(4))
    runner.freeze(strict=False)
    with pytest.warns(EagerStepWarning):
        runner(torch.arange(4))


def test_eager_only_by_request_is_no_downgrade(make_runner, model):
    """A ceiling of NONE is requested, so it is counted but neither warned of nor refused."""
    runner = make_runner(model, TWO, options=RunnerOptions(strict=True))
    runner.capture()
    given = batch(3)
    assert_same(runner(**given, ceiling=0), model(**given))
    assert runner.stats().eager_by_reason == {"ceiling": 1}


def test_step_that_is_not_split_has_no_piecewise(make_runner, model, backend, monkeypatch):
    """Without a way to break captures the mode is reduced, and eager steps give the reason."""
    monkeypatch.setattr(backend, "capture_segments", None)
    runner = make_runner(model, TWO, mode="PIECEWISE")
    assert not runner.lanes[0].work.step.can_split
    assert str(runner.config.mode) == "NONE"
    assert str(runner.lanes[0].requested_mode) == "PIECEWISE"
    assert runner.capture().num_graphs == 0
    given = batch(3)
    with pytest.warns(EagerStepWarning, match="piecewise_unsupported"):
        assert_same(runner(**given), model(**given))
    assert runner.stats().eager_by_reason == {"piecewise_unsupported": 1}
    assert runner.explain(3).decision.reason == Reason.PIECEWISE_UNSUPPORTED
    assert "requested: PIECEWISE" in str(runner)
    assert "FULL only" in str(runner)


def test_step_that_is_not_split_replays_whole_unless_a_mode_is_given(backend, model):
    """By default one graph serves any batch of its size; an explicit mode stays."""
    inputs = {
        name: StaticInput((None, *one.shape[1:]), one.dtype) for name, one in batch(1).items()
    }
    runner = GraphRunner(model, inputs, sizes=(4, 8), backend=backend)
    assert (runner.config.mode, runner.config.is_mode_given) == (CUDAGraphMode.FULL, True)
    assert runner.lanes[0].requested_mode is CUDAGraphMode.FULL
    assert runner.capture().num_graphs == 2
    runner(**batch(3))
    assert runner.stats().eager_by_reason == {}
    runner.swap(sizes=(8,))
    assert runner.config.mode is CUDAGraphMode.FULL
    asked = GraphRunner(model, inputs, sizes=(4, 8), mode="FULL_AND_PIECEWISE", backend=backend)
    assert asked.config.mode is CUDAGraphMode.FULL_AND_PIECEWISE


def test_whole_step_that_is_not_captured_for_all_batches_is_no_full_graph(backend):
    """Declarations of operators apply; FULL is derived only if none forbids it."""
    piece = attrs.evolve(graph_piece(lambda tokens: tokens + 1), support=AttentionSupport.NEVER)
    inputs = {"tokens": StaticInput((None,), "int64")}
    with pytest.warns(ModeDowngradeWarning, match="<lambda> cannot be captured. Set mode='NONE'"):
        runner = GraphRunner([piece], inputs, sizes=(4,), backend=backend)
    assert not runner.config.mode.has_full_cudagraphs()


def test_print_shows_the_ladder(make_runner, model, quiet):
    runner = make_runner(model, TWO)
    runner.capture([key for key in runner.registry if key.num_tokens >= 4])
    for rows in (3, 3, 8, 1):
        runner(**batch(rows))
    lines = {line.split("  ")[0]: line.split() for line in str(runner).splitlines()}
    assert lines["FULL tokens=4"][2:] == ["captured", "2"]
    assert lines["FULL tokens=8"][2:] == ["captured", "1"]
    assert lines["FULL tokens=1"][2:] == ["declared", "0", "not_captured", "1"]


def test_explain_changes_nothing(make_runner, model):
    runner = make_runner(model, TWO)
    runner.capture()
    before = runner.stats()
    found = runner.explain(3)
    assert str(found.decision.key) == "FULL tokens=4"
    assert found.decision.padding == 1
    assert runner.stats() == before


def test_the_error_of_a_failed_capture_is_a_sentence_of_its_own():
    def step(x):
        if torch.equal(x, torch.zeros_like(x)):  # only in warmups, on dummy rows
            raise RuntimeError("boom")
        return x

    runner = GraphRunner(step, {"x": StaticInput((None,), "float32")}, sizes=(4,), backend="tape")
    runner.capture()
    with pytest.warns(EagerStepWarning, match=r"boom\. This warning is issued once"):
        runner(torch.ones(3))


def test_stats_are_plain_data(make_runner, model):
    runner = make_runner(model, TWO)
    runner.capture()
    runner(**batch(3))
    found = runner.stats().to_dict()
    assert found["hits"] == {"FULL tokens=4": 1}
    assert found["padding"] == pytest.approx(1 / 3)  # of the real tokens
    assert found["captures"] == 4


def test_progress_is_told_largest_first(make_runner, model):
    runner = make_runner(model, TWO)
    told = []
    runner.capture(progress=lambda done, total, key: told.append((done, total, key)))
    sizes = [key.num_tokens for _, _, key in told if key is not None]
    assert sizes == [8, 4, 2, 1]
    assert [(done, total) for done, total, _ in told] == [(i, 4) for i in range(5)]


def test_progress_goes_to_stderr(make_runner, model, capsys):
    make_runner(model, TWO).capture(progress=True)
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines() == [
        "capture 0/4: FULL 8 tokens",
        "capture 1/4: FULL 4 tokens",
        "capture 2/4: FULL 2 tokens",
        "capture 3/4: FULL 1 token",
        "capture 4/4: done",
    ]


def test_progress_is_a_bar_on_a_terminal(make_runner, model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    make_runner(model, TWO).capture(progress=True)
    last = capsys.readouterr().err.split("\r")[-1]
    assert last.startswith("capture [##############################] 4/4 done")
    assert last.endswith("\n")


def test_a_step_that_raises_raises_its_own_error(make_runner):
    def step(tokens):
        if not torch.compiler.is_compiling() and tokens.shape[0] == 0:
            raise KeyError("mine")
        return tokens

    runner = make_runner(step)
    with pytest.raises(KeyError, match="mine"):
        runner(torch.arange(0))
    assert runner.stats().failed_steps == 1


class TestSettings:
    def test_runner_of_a_runner_is_refused(self, make_runner, model):
        runner = make_runner(model, TWO)
        with pytest.raises(ConfigError, match="Pass the step of that runner"):
            GraphRunner(runner, TWO)

    def test_setting_is_given_in_one_place(self, model):
        with pytest.raises(ConfigError, match=r"options.config also has sizes=\(1, 2\)"):
            GraphRunner(
                model,
                TWO,
                sizes=(1,),
                options=RunnerOptions(config=DispatchConfig(sizes=(1, 2))),
            )

    def test_config_alone(self, make_runner, model):
        config = DispatchConfig(sizes=(2, 4), mode="FULL")
        options = RunnerOptions(config=config)
        runner = make_runner(model, TWO, sizes=None, mode=None, options=options)
        assert runner.config is config

    def test_config_and_arguments_go_together(self, make_runner, model):
        options = RunnerOptions(config=DispatchConfig(max_num_seqs=3))
        config = make_runner(model, TWO, sizes=(2, 4), options=options).config
        assert config == DispatchConfig(sizes=(2, 4), max_num_seqs=3, mode="FULL")

    @pytest.mark.parametrize("value", ["fresh", None, 3])
    def test_unknown_kind_of_outputs(self, make_runner, model, value):
        with pytest.raises(ConfigError, match="'owned' or 'view'"):
            make_runner(model, TWO, outputs=value)

    def test_inputs_or_example_but_not_both(self, model):
        with pytest.raises(ConfigError, match="inputs must be given unless example is given"):
            GraphRunner(model)
        with pytest.raises(ConfigError, match="example must be omitted if inputs are given"):
            GraphRunner(model, TWO, example={"tokens": torch.ones(3)})

    def test_unknown_policy_names_the_nearest(self, model):
        with pytest.raises(UnknownNameError):
            GraphRunner(model, TWO, policy="vlm", backend="tape")

    def test_options_need_a_named_policy(self, make_runner, model):
        with pytest.raises(ConfigError, match="with a policy name"):
            make_runner(model, TWO, options=RunnerOptions(policy_options={"a": 1}))

    def test_unknown_backend(self, make_runner, model):
        with pytest.raises(UnknownNameError, match="tap"):
            make_runner(model, TWO, backend="tap")

    @pytest.mark.parametrize("device", ["cuda:0", "nonsense"])
    def test_device_that_contradicts_the_backend(self, make_runner, model, device):
        with pytest.raises(ConfigError, match="device"):
            make_runner(model, TWO, options=RunnerOptions(device=device))

    @pytest.mark.parametrize("sizes", [(0,), (-1,), (True,), (1.5,), ("x",), (9,)])
    def test_bad_sizes_are_refused(self, make_runner, model, sizes):
        with pytest.raises(ConfigError, match="sizes"):
            make_runner(model, TWO, sizes=sizes, max_num_tokens=8)

    def test_no_sizes_gives_an_eager_runner(self, make_runner, model):
        """Without sizes a runner starts, and every step runs eager."""
        with pytest.warns(CaptureSizeWarning):
            runner = make_runner(model, TWO, sizes=(), max_num_tokens=8)
        assert runner.capture().num_graphs == 0
        given = batch(3)
        assert_same(runner(**given), model(**given))

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("warmups", -1),
            ("warmups", True),
            ("capture_after", 0),
            ("max_graphs", -1),
            ("max_bytes", 1.5),
            ("eviction", "oldest"),
            ("state", [3]),
            ("output_batch_dims", "x"),
            ("lazy", "no"),
            ("strict", 1),
            ("share_outputs", None),
        ],
    )
    def test_bad_settings_are_refused(self, make_runner, model, setting, value):
        with pytest.raises(ConfigError, match=setting):
            make_runner(model, TWO, **{setting: value})


class TestPieces:
    """A step split at its eager piece."""

    @pytest.fixture
    def parts(self):
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(50, 8, generator=generator)
        weight = torch.randn(8, 8, generator=generator)

        def embed(tokens, positions):
            return table[tokens] + positions[:, None]

        def mix(hidden):
            return hidden.cumsum(0) * 2  # new memory at every call

        def head(hidden, positions):
            return hidden @ weight + positions[:, None]

        def whole(tokens, positions):
            return head(mix(embed(tokens, positions)), positions)

        return [graph_piece(embed), eager_piece(mix), graph_piece(head)], whole

    def test_all_modes_give_what_eager_gives(self, make_runner, parts):
        pieces, whole = parts
        runner = make_runner(pieces, TWO)
        assert runner.lanes[0].work.step.can_split
        assert runner.capture().num_graphs == 8
        for ceiling in (2, 1, 0):
            for seed, rows in enumerate((8, 3, 5, 1, 2, 8)):
                given = batch(rows, seed)
                assert_same(runner(**given, ceiling=ceiling), whole(**given))
        assert runner.stats().steps_by_mode == {"NONE": 6, "PIECEWISE": 6, "FULL": 6}

    def test_variants_of_one_size_are_told_apart(self, make_runner, parts):
        """Progress, hits and failures are counted per key, not per size."""
        runner, told = make_runner(parts[0], TWO), []
        runner.capture(progress=lambda done, total, key: told.append(key))
        assert sorted(map(str, told[:-1])) == sorted(map(str, runner.registry))
        for ceiling in (2, 2, 1):
            runner(**batch(3), ceiling=ceiling)
        hits = {key: number for key, number in runner.stats().hits.items() if number}
        assert hits == {"FULL tokens=4": 2, "PIECEWISE tokens=4": 1}
        runner.evict(next(key for key in runner.registry if str(key) == "FULL tokens=4"))
        runner(**batch(3), ceiling=1)
        assert runner.stats().hits["PIECEWISE tokens=4"] == 2

    def test_eager_piece_runs_python_each_time_and_graph_pieces_do_not(self, make_runner):
        in_graph, ran = Mock(), []

        def first(tokens):
            in_graph()
            return tokens * 2

        def second(x):
            ran.append("eager")
            return x + 1

        runner = make_runner([graph_piece(first), eager_piece(second)])
        runner.capture()
        assert ran == []  # hidden runs leave no state
        assert_same(runner(torch.arange(3), ceiling=1), torch.arange(3) * 2 + 1)
        assert ran == ["eager"]
        ran.clear()
        in_graph.reset_mock()
        assert_same(runner(torch.arange(3), ceiling=1), torch.arange(3) * 2 + 1)
        assert ran == ["eager"]
        in_graph.assert_not_called()

    def test_eager_piece_that_works_in_place_needs_no_copy(self, make_runner):
        """A value that keeps its address is read there, so the next graph needs no buffer."""

        def double(x):
            x.mul_(2)
            return x

        pieces = [
            graph_piece(lambda tokens: tokens + 1),
            eager_piece(double),
            graph_piece(lambda x: x - 1),
        ]
        runner = make_runner(pieces)
        runner.capture()
        for rows in (8, 3, 5):
            given = torch.arange(rows)
            assert_same(runner(given, ceiling=1), (given + 1) * 2 - 1)
        assert runner.lanes[0].lane.between.num_bytes == 0

    def test_fresh_memory_is_copied_to_where_the_graph_reads(self, make_runner, parts):
        pieces, _ = parts
        runner = make_runner(pieces, TWO)
        runner.capture()
        assert runner.lanes[0].lane.between.num_bytes == 8 * 8 * 4  # one buffer for all sizes

    def test_eager_piece_at_both_ends(self, make_runner):
        pieces = [
            eager_piece(lambda tokens: (tokens * 3, 5)),
            graph_piece(lambda pair: pair[0] + pair[1]),
            eager_piece(lambda x: {"x": x, "y": x + 1}),
        ]
        runner = make_runner(pieces)
        runner.capture()
        for rows in (8, 3):
            given = torch.arange(rows)
            expected = {"x": given * 3 + 5, "y": given * 3 + 6}
            assert_same(runner(given, ceiling=1), expected)

    def test_error_of_an_eager_piece_is_the_users(self, make_runner):
        def picky(x):
            if int(x[0]) == 7:
                raise ZeroDivisionError("seven")
            return x

        pieces = [graph_piece(lambda tokens: tokens + 0), eager_piece(picky)]
        runner = make_runner(pieces, mode="PIECEWISE")
        runner.capture()
        with pytest.raises(ZeroDivisionError, match="seven"):
            runner(torch.tensor([7, 1]), ceiling=1)
        assert_same(runner(torch.tensor([6, 1]), ceiling=1), torch.tensor([6, 1]))

    def test_python_value_that_changes_between_pieces_is_no_wrong_replay(self, make_runner):
        """The value is baked into the next graph, so the step is refused instead of stale."""
        factor = [2]
        pieces = [
            graph_piece(lambda tokens: tokens + 0),
            eager_piece(lambda x: (x, factor[0])),
            graph_piece(lambda pair: pair[0] * pair[1]),
        ]
        runner = make_runner(pieces, mode="PIECEWISE")
        runner.capture()
        assert_same(runner(torch.arange(3), ceiling=1), torch.arange(3) * 2)
        factor[0] = 3
        from dispatchkit.errors import ReplayError

        with pytest.raises(ReplayError, match="as a constant"):
            runner(torch.arange(3), ceiling=1)

    @pytest.mark.parametrize(
        ("pieces", "match"),
        [
            ([], "at least one piece"),
            ([lambda tokens: tokens], "marked"),
            ([eager_piece(lambda tokens: tokens)], "at least one graph_piece"),
            ([graph_piece(lambda tokens: tokens), graph_piece(lambda: 1)], "first parameter"),
            ([graph_piece(lambda tokens: tokens), graph_piece(3)], r"step\[1\] must be callable"),
            (lambda tokens, /: tokens, "lambda tokens: fn\\(tokens\\)"),
            (
                [graph_piece(lambda tokens: tokens), graph_piece(lambda one, tokens, /: one)],
                "lambda value, tokens: fn",
            ),
        ],
    )
    def test_bad_pieces_are_refused(self, make_runner, pieces, match):
        with pytest.raises(ConfigError, match=match):
            make_runner(pieces)

    def test_input_that_no_piece_takes_is_refused(self, make_runner):
        with pytest.raises(ConfigError, match="Remove it from the inputs"):
            make_runner(lambda tokens: tokens, TWO)
        with pytest.raises(ConfigError, match="row_count must be a parameter of the step"):
            make_runner(
                lambda tokens: tokens,
                options=RunnerOptions(buffers=BufferOptions(row_count="num_rows")),
            )

    def test_parameter_without_an_input_is_refused(self, make_runner):
        with pytest.raises(ConfigError, match="Also declare: mask"):
            make_runner(lambda tokens, mask: tokens)
