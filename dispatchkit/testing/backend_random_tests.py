"""Promises about random numbers, for BackendTests."""

from __future__ import annotations

from typing import Any

import pytest

from dispatchkit.testing.backend_rig import DRAWS, Rig


class RandomTests:
    """Replays draw what eager would draw, and captures draw nothing."""

    # -- random numbers -------------------------------------------------------------------

    @pytest.mark.parametrize("own_generator", [False, True], ids=["default", "own"])
    @pytest.mark.parametrize("name", DRAWS)
    def test_replays_draw_the_sequence_of_eager(
        self, rig: Rig, name: str, own_generator: bool
    ) -> None:
        """Eager and replay may be mixed without a repeated or a lost number."""
        device = rig.backend.torch_device
        generator = rig.generator() if own_generator else None
        source = generator if generator is not None else rig.default_generator()
        draw = DRAWS[name]
        source.manual_seed(11)
        expected = [draw(rig.torch, device, generator).clone() for _ in range(4)]
        source.manual_seed(11)
        before = source.get_state()
        graph = rig.capture(
            lambda: draw(rig.torch, device, generator),
            generators=[] if generator is None else [generator],
        )
        assert rig.torch.equal(source.get_state(), before), "The capture moved the generator."
        drawn = [rig.replayed(graph), draw(rig.torch, device, generator).clone()]
        drawn += [rig.replayed(graph), rig.replayed(graph)]
        assert [rig.equal(a, b) for a, b in zip(drawn, expected, strict=True)] == [True] * 4

    def test_dropout_draws_the_sequence_of_eager(self, rig: Rig) -> None:
        """The draw that models make in training."""
        x = rig.torch.ones(64, device=rig.backend.torch_device)

        def drop() -> Any:
            return rig.torch.nn.functional.dropout(x, 0.5)

        rig.default_generator().manual_seed(3)
        expected = [drop().clone() for _ in range(3)]
        rig.default_generator().manual_seed(3)
        graph = rig.capture(drop)
        drawn = [rig.replayed(graph) for _ in range(3)]
        assert [rig.equal(a, b) for a, b in zip(drawn, expected, strict=True)] == [True] * 3

    def test_seeding_again_repeats_the_replays(self, rig: Rig) -> None:
        """The seed is read at replay, not at capture."""
        graph = rig.capture(lambda: rig.torch.rand(8, device=rig.backend.torch_device))
        rig.default_generator().manual_seed(5)
        first = rig.replayed(graph)
        rig.default_generator().manual_seed(5)
        assert rig.equal(rig.replayed(graph), first)
        assert not rig.equal(rig.replayed(graph), first), (
            "Two replays in a row drew the same numbers twice."
        )

    def test_a_graph_says_whether_it_draws(self, rig: Rig) -> None:
        """Graphs without random state may be launched by shorter ways."""
        x = rig.zeros(4)
        quiet = rig.capture(lambda: x + 1)
        drawing = rig.capture(lambda: rig.torch.rand(4, device=rig.backend.torch_device))
        quiet.replay()
        drawing.replay()
        assert not quiet.has_random_state, "A graph that draws nothing says that it draws."
        assert drawing.has_random_state, "A graph that draws says that it does not."
