"""Reasons for eager that are downgrades, with what to do about each."""

from __future__ import annotations

from collections.abc import Mapping

from dispatchkit.dispatch import Reason

#: The reason of a stale key whose graph has a replaced value built in; details follow a colon.
REPLACED = "replaced"
#: Reasons of refused captures that are more specific than a failure.
REFUSED = frozenset(
    {
        Reason.PYTHON_STATE,
        Reason.FIRST_CALL,
        Reason.CONTAINER_WRITTEN,
        Reason.GRADIENTS,
        Reason.CALL_DIFFERS,
    }
)
#: These, and reasons for which a graph was later disabled. A failed key's reason begins with one of
#: them, before a colon, unless its capture simply failed.
OF_FAILED_KEYS = REFUSED | {Reason.REPLAY_FAILED, Reason.CHECK_FAILED}
#: Reasons that are downgrades the user may want to know about; the others are intended.
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


_CAPTURE_ANEW = "Undo that, or call runner.invalidate() and runner.capture() for new graphs."
#: What to do about a downgrade; docs/how-to/operate.md has details.
NEXT_STEPS: Mapping[str, str] = {
    Reason.ABOVE_LARGEST: "A larger capture size would serve them.",
    Reason.NO_KEY: "The mode and the sizes have no graph for this kind of batch.",
    Reason.NOT_CAPTURED: "Call runner.capture(), or make the runner with lazy=True.",
    Reason.CAPTURE_FAILED: "print(runner) says why its capture failed.",
    Reason.EVICTED: "runner.capture() captures it again, within max_graphs and max_bytes.",
    Reason.STALE: "runner.capture() captures it again.",
    Reason.TOO_MANY_REQS: "A larger max_num_seqs would serve them.",
    Reason.OUTSIDE_AXIS: "More buckets on the axis would serve them.",
    Reason.PIECEWISE_UNSUPPORTED: (
        "The step is not split, so mixed batches have no graph in this mode. Make the runner with "
        "mode='FULL' if one graph serves any batch of its size, pass uniform=True for decode-only "
        "batches, or split the step."
    ),
    Reason.NO_ANSWER: (
        "The policy returned None for them; put it before vllm in a composite, which decides them."
    ),
    Reason.POLICY_ERROR: "The policy broke the contract; runner.explain() says how.",
    Reason.REPLAY_FAILED: "print(runner) says what the replay raised.",
    Reason.CHECK_FAILED: "print(runner) says how the replay differed from eager.",
    Reason.CALL_DIFFERS: (
        "A function under @eager_region returned other shapes, types, strides or values than in "
        "the capture; runner.stats().differing_calls says where."
    ),
    Reason.PYTHON_STATE: (
        "print(runner) names attribute, class, file and line; keep such state in a tensor that the "
        "step writes in place."
    ),
    Reason.FIRST_CALL: "Nothing to do: the key is captured after this call.",
    Reason.GRADIENTS: (
        "The step differentiates: do so under torch.enable_grad() inside the step, or outside it."
    ),
    Reason.CONTAINER_WRITTEN: (
        "print(runner) names the key or index; return the new value instead, and write it outside "
        "the step."
    ),
    Reason.ROWS_DEPEND: (
        "Padding changes what this step computes; print(runner) says where. Capture the exact "
        "sizes, mask padding rows in the step (row_count), or, if you know that padding does not "
        "matter, set CaptureOptions(prove_rows=False)."
    ),
    Reason.ROWS_NOT_THE_BUCKET: (
        "The rows of an output are not those of the batch, so padding cannot be cut off; "
        "print(runner) says which output. Capture the exact sizes, or declare output_batch_dims."
    ),
    Reason.ROWS_NOT_INDEPENDENT: (
        "Rows depend on each other, or each run of the step changes something; print(runner) "
        "says what. Capture a graph as large as the batch, or leave out rows_independent."
    ),
    Reason.OUTPUTS_NOT_JOINED: (
        "An output has no row dimension, so the outputs of two parts cannot be joined. Return it "
        "per row, or capture a graph as large as the batch."
    ),
    Reason.WEIGHTS_REPLACED: "A lazy runner captures again; otherwise call runner.capture().",
    Reason.VALUE_CHANGED: "A lazy runner captures again; otherwise call runner.capture().",
    Reason.AUTOCAST: "Capture under the autocast that steps run under.",
    Reason.TRAINING_MODE: f"A module was switched to or from training mode. {_CAPTURE_ANEW}",
    Reason.MOVED_MODULE: f"A module was moved, or its dtype changed. {_CAPTURE_ANEW}",
}


class PaddedDrawsWarning(RuntimeWarning):
    """A step that draws random numbers is padded; issued once per runner."""


#: The effect of padding on a graph that draws random numbers.
PADDED_DRAWS = (
    "The step draws random numbers, for rows of padding too: from the same seed, later steps may "
    "draw other numbers than eager steps would."
)


class EagerStepWarning(RuntimeWarning):
    """Steps run eager instead of replaying; issued once per reason."""
