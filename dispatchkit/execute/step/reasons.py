"""Reasons for unintended eager steps (downgrades), and advice on how to resolve each."""

from __future__ import annotations

from collections.abc import Mapping

from dispatchkit.dispatch import Reason

#: Reason for a stale key whose graph contains a replaced value; details follow a colon.
REPLACED = "replaced"
#: Reasons why a capture is refused; each is more specific than ``capture_failed``.
REFUSED_CAPTURES = frozenset(
    {
        Reason.PYTHON_STATE,
        Reason.FIRST_CALL,
        Reason.CONTAINER_WRITTEN,
        Reason.GRADIENTS,
        Reason.CALL_DIFFERS,
    }
)
#: Reasons for refused captures and for graphs that were disabled later. The reason of a failed key
#: begins with one of these reasons and a colon, unless the capture of the key raised an exception.
FAILED_KEY_REASONS = REFUSED_CAPTURES | {Reason.REPLAY_FAILED, Reason.CHECK_FAILED}
#: Reasons that are downgrades; eager steps with any other reason are intended.
DOWNGRADES = frozenset(
    {
        Reason.ABOVE_LARGEST,
        Reason.NO_KEY,
        Reason.NOT_CAPTURED,
        Reason.CAPTURE_FAILED,
        Reason.EVICTED,
        Reason.STALE,
        Reason.TOO_MANY_REQS,
        Reason.OUTSIDE_AXIS,
        Reason.PIECEWISE_UNSUPPORTED,
        Reason.NO_ANSWER,
        Reason.POLICY_ERROR,
        Reason.REPLAY_FAILED,
        Reason.CHECK_FAILED,
        Reason.CALL_DIFFERS,
        Reason.PYTHON_STATE,
        Reason.FIRST_CALL,
        Reason.CONTAINER_WRITTEN,
        Reason.GRADIENTS,
        Reason.ROWS_DEPEND,
        Reason.ROWS_NOT_THE_BUCKET,
        Reason.ROWS_NOT_INDEPENDENT,
        Reason.OUTPUTS_NOT_JOINED,
        Reason.WEIGHTS_REPLACED,
        Reason.VALUE_CHANGED,
        Reason.AUTOCAST,
        Reason.TRAINING_MODE,
        Reason.MOVED_MODULE,
    }
)


_RECAPTURE = (
    "Undo the change, or call runner.invalidate() and runner.capture() to capture new graphs."
)
_CAPTURE_AGAIN = "Call runner.capture(); a lazy runner captures the graph again by itself."
#: Next step for each reason that a user can act on; docs/how-to/operate.md has details.
NEXT_STEPS: Mapping[str, str] = {
    Reason.ABOVE_LARGEST: "Add a capture size at least as large as the batch.",
    Reason.NO_KEY: (
        "The policy declares no graph for this kind of batch. Change the mode or the capture sizes."
    ),
    Reason.MODE_NONE: (
        "The mode runs this kind of batch eager. Choose a mode that captures it, or pass "
        "uniform=True if it is a uniform decode batch."
    ),
    Reason.NOT_CAPTURED: "Call runner.capture(), or create the runner with lazy=True.",
    Reason.CAPTURE_FAILED: (
        "Fix the cause, which print(runner) shows, then call runner.capture(again=True)."
    ),
    Reason.EVICTED: (
        "Call runner.capture() to capture the graph again. If runner.capture() skips the graph, "
        "increase max_bytes."
    ),
    Reason.STALE: "Call runner.capture() to capture the graph again.",
    Reason.DISABLED: (
        "Call runner.controls.set_enabled(True, key=key), or set_enabled(True, mode=mode) if the "
        "mode was disabled."
    ),
    Reason.CAPTURE_PENDING: (
        "The graph is captured after capture_after calls, or by the background capture in "
        "progress. Wait, or lower CaptureOptions(capture_after=...)."
    ),
    Reason.TOO_MANY_REQS: "Increase max_num_seqs to at least the number of requests in the batch.",
    Reason.OUTSIDE_AXIS: "Add a bucket for the value of the axis in this batch.",
    Reason.PIECEWISE_UNSUPPORTED: (
        "The step is not split into pieces, so PIECEWISE cannot run. Create the runner with "
        "mode='FULL' if one graph can serve any batch of its size, or pass a list of pieces as the "
        "step. In mode FULL_AND_PIECEWISE, decode-only batches have FULL graphs: pass uniform=True "
        "for them."
    ),
    Reason.NO_ANSWER: (
        "The policy returned None, so no policy decides for this batch. Return a decision, or use "
        "the composite policy with this policy first and vllm second."
    ),
    Reason.POLICY_ERROR: (
        "The policy's decide() raised, or returned a decision that violates a constraint. Fix the "
        "policy, and test it with dispatchkit.testing.PolicyTests."
    ),
    Reason.REPLAY_FAILED: (
        "print(runner) shows the error of the replay. Fix its cause, then call "
        "runner.capture(again=True)."
    ),
    Reason.CHECK_FAILED: (
        "print(runner) shows how the replay differed from eager. Fix the step, then call "
        "runner.capture(again=True)."
    ),
    Reason.CALL_DIFFERS: (
        "A function under @eager_region returned different shapes, types, strides or Python "
        "values than in the capture; runner.stats().differing_calls shows where. Return "
        "the same shapes, types, strides and values every time, or move more of the step into that "
        "function."
    ),
    Reason.PYTHON_STATE: (
        "Each call of the step changes Python state, but a replay does not. print(runner) names "
        "the attribute, the class and, if known, the line. Keep this state in a tensor that the "
        "step writes in place."
    ),
    Reason.FIRST_CALL: "No action is needed: the key is captured after this call.",
    Reason.GRADIENTS: (
        "The step computes gradients. Compute them under torch.enable_grad() inside the step, or "
        "outside the step."
    ),
    Reason.CONTAINER_WRITTEN: (
        "The step changes an element of a container that it receives as an argument; "
        "print(runner) names the element. Return the new value, and assign it outside the step."
    ),
    Reason.ROWS_DEPEND: (
        "Padding changes the results of the step; print(runner) shows where. Capture the exact "
        "sizes, mask padding rows in the step (row_count), or, if you know that padding does not "
        "matter, set CaptureOptions(prove_rows=False)."
    ),
    Reason.ROWS_NOT_THE_BUCKET: (
        "The rows of an output are not the rows of the batch, so padding cannot be cut off; "
        "print(runner) shows which output. Capture the exact sizes, or declare output_batch_dims."
    ),
    Reason.ROWS_NOT_INDEPENDENT: (
        "Rows depend on each other, or each run of the step changes state; print(runner) shows "
        "the cause. Capture a graph as large as the batch, or remove rows_independent."
    ),
    Reason.OUTPUTS_NOT_JOINED: (
        "An output has no row dimension, so the outputs of two parts cannot be joined. Return one "
        "value per row, or capture a graph as large as the batch."
    ),
    Reason.WEIGHTS_REPLACED: _CAPTURE_AGAIN,
    Reason.VALUE_CHANGED: _CAPTURE_AGAIN,
    Reason.AUTOCAST: "Capture under the autocast state in which the steps run.",
    Reason.TRAINING_MODE: f"The training mode of a module was changed. {_RECAPTURE}",
    Reason.MOVED_MODULE: f"A module was moved, or its dtype changed. {_RECAPTURE}",
}


#: Next step for ``not_captured`` and ``evicted`` if ``max_graphs`` is reached.
MAX_GRAPHS_REACHED = (
    "max_graphs is reached, so runner.capture() skips this graph. Increase max_graphs, or create "
    "the runner with lazy=True: a lazy runner evicts other graphs to capture this one."
)


class PaddedDrawsWarning(RuntimeWarning):
    """A padded step draws random numbers; issued once per runner."""


#: Warning text about padding in graphs that draw random numbers.
PADDED_DRAWS = (
    "The step draws random numbers for padding rows too. With the same seed, later steps may "
    "therefore draw different numbers than eager steps."
)


class EagerStepWarning(RuntimeWarning):
    """Steps run eager instead of replaying; issued once per reason."""
