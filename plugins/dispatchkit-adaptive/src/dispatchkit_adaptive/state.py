"""What was learnt, on disk: JSON with a version and a fingerprint, never pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dispatchkit import BatchDescriptor, GraphKey, RuntimeMode
from dispatchkit.errors import DispatchkitError, shortened
from dispatchkit.files import write_whole

from dispatchkit_adaptive.arms import Arm
from dispatchkit_adaptive.buckets import ArmId, Parts, Piece

__all__ = ["StateError", "device_fingerprint", "read_state", "write_state"]

FORMAT, VERSION = "dispatchkit-adaptive", 1
_MAX_BYTES = 64 * 1024 * 1024
_LARGEST_NUMBER = 1e15  # tokens, and microseconds: 30 years
_Arms = dict[tuple[tuple[str, bool], ArmId], Arm]


class StateError(DispatchkitError, ValueError):
    """A state file cannot be used; the message says why."""


def device_fingerprint(model: str = "", device: int = 0) -> dict[str, str]:
    """Return what measured times are true for: device, driver, torch and model.

    Args:
        model: A name of the model, of the caller's choice.
        device: Index of the CUDA device.
    """
    import torch

    found = {"device": "cpu", "driver": "", "torch": torch.__version__, "model": model}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(device)
        found["driver"] = f"cuda {torch.version.cuda}"
    return found


def write_state(path: Path, fingerprint: Mapping[str, str], arms: _Arms) -> None:
    """Write arms to a file, which has its name only once it is whole.

    Raises:
        ConfigError: The file cannot be written; an older one is kept.
    """
    body = {
        "fingerprint": dict(fingerprint),
        "arms": [
            {
                "clock": clock,
                "queued": queued,
                "noise": arm.noise,
                "samples": [list(pair) for pair in arm.samples],
                **_facts(ident),
            }
            for ((clock, queued), ident), arm in arms.items()
            if arm.samples
        ],
    }
    whole = {"format": FORMAT, "version": VERSION, "digest": _digest(body), **body}
    write_whole(path, json.dumps(whole) + "\n")


def read_state(path: Path, fingerprint: Mapping[str, str], history_size: int) -> _Arms:
    """Return the arms that a file has.

    Raises:
        StateError: It cannot be read, is torn or foreign, or of another version or
            fingerprint.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
        data = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{path}: it cannot be read as JSON ({error}).") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise StateError(f"{path}: it is no state of the adaptive policy.")
    if data.get("version") != VERSION:
        raise StateError(
            f"{path}: it has version {data.get('version')!r}, only {VERSION} can be read."
        )
    body = {"fingerprint": data.get("fingerprint"), "arms": data.get("arms")}
    if data.get("digest") != _digest(body):
        raise StateError(f"{path}: its content does not fit its digest; it was cut or changed.")
    if body["fingerprint"] != dict(fingerprint):
        raise StateError(
            f"{path}: it was learnt on {body['fingerprint']}, here is {dict(fingerprint)}."
        )
    try:
        return dict(_read_arm(item, history_size) for item in data["arms"])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = shortened(str(error))
        raise StateError(f"{path}: an arm in it is not possible ({why}).") from error


def _is_number(value: Any, least: float) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and least <= value <= _LARGEST_NUMBER  # NaN is neither
    )


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _facts(ident: ArmId) -> dict[str, Any]:
    if isinstance(ident, Parts):
        return {"parts": [_facts(key) for key in ident.keys]}
    own = ident if isinstance(ident, Piece) else ident.descriptor
    facts = {
        "uniform": own.uniform,
        "query_len": own.query_len,
        "max_query_len": own.max_query_len,
        "num_active_loras": own.num_active_loras,
        "axes": list(own.axes),
    }
    if isinstance(ident, Piece):
        return {"mode": "NONE", "num_tokens": ident.top, **facts}
    return {
        "mode": ident.mode.name,
        "num_tokens": ident.num_tokens,
        "num_reqs": ident.descriptor.num_reqs,
        **facts,
    }


def _read_arm(
    item: Mapping[str, Any], history_size: int
) -> tuple[tuple[tuple[str, bool], ArmId], Arm]:
    parts = item.get("parts")
    ident: ArmId = _read_ident(item) if parts is None else Parts(tuple(map(_read_key, parts)))
    arm = Arm(history_size, over_tokens=isinstance(ident, Piece))
    for num_tokens, us in item["samples"]:
        # Of any type and size before this; lines are fitted with squares of both.
        if not (_is_number(num_tokens, 1) and _is_number(us, 1e-6)):
            raise ValueError(f"sample {num_tokens!r}, {us!r}")
        arm.add(num_tokens, us, watch=False)
    return ((str(item["clock"]), bool(item["queued"])), ident), arm


def _read_key(item: Mapping[str, Any]) -> GraphKey:
    ident = _read_ident(item)
    if isinstance(ident, Piece):
        raise TypeError("a part that runs eager")
    return ident


def _read_ident(item: Mapping[str, Any]) -> GraphKey | Piece:
    mode = RuntimeMode.parse(item["mode"])
    shared = {
        "uniform": item["uniform"],
        "query_len": item["query_len"],
        "max_query_len": item["max_query_len"],
        "num_active_loras": item["num_active_loras"],
        "axes": tuple(item["axes"]),
    }
    if mode is RuntimeMode.NONE:
        return Piece(top=item["num_tokens"], **shared)
    return GraphKey(mode, BatchDescriptor(item["num_tokens"], item["num_reqs"], **shared))
