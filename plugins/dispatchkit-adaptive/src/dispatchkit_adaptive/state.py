"""State files: learned estimates as JSON with a version and a fingerprint, never pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from dispatchkit import BatchDescriptor, GraphKey, RuntimeMode
from dispatchkit.errors import DispatchkitError, shortened
from dispatchkit.files import write_whole

from dispatchkit_adaptive.arms import Arm, ArmId, Regime
from dispatchkit_adaptive.estimates import Estimate

__all__ = ["StateError", "device_fingerprint", "read_state", "write_state"]

FORMAT, VERSION = "dispatchkit-adaptive", 2
_MAX_BYTES = 64 * 1024 * 1024
_NEXT_STEP = "Pass a file that save() wrote."


class StateError(DispatchkitError, ValueError):
    """Raised if a state file cannot be used."""


def device_fingerprint(model: str = "", device: int = 0) -> dict[str, str]:
    """Return the device, CUDA version, torch version and model, on which measured times depend.

    Args:
        model: Any name for the model.
        device: Index of the CUDA device; without CUDA, the device is ``cpu``.
    """
    import torch

    found = {"device": "cpu", "driver": "", "torch": torch.__version__, "model": model}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(device)
        found["driver"] = f"cuda {torch.version.cuda}"
    return found


def write_state(path: Path, fingerprint: Mapping[str, str], arms: Iterable[Arm]) -> None:
    """Write the estimates of arms to a file, completely or not at all.

    Raises:
        ConfigError: The file cannot be written; an existing file is kept.
    """
    body = {
        "fingerprint": dict(fingerprint),
        "arms": [
            {"clock": clock, "queued": queued, **_facts(arm.ident), "estimate": one.numbers()}
            for arm in list(arms)
            for (clock, queued), one in list(arm.estimates.items())
            if one.is_known
        ],
    }
    whole = {"format": FORMAT, "version": VERSION, "digest": _digest(body), **body}
    write_whole(path, json.dumps(whole) + "\n")


def read_state(
    path: Path, fingerprint: Mapping[str, str], history_size: int
) -> list[tuple[ArmId, Regime, Estimate]]:
    """Return the estimates stored in a file, each with its arm and regime.

    Raises:
        StateError: The file cannot be read, is incomplete or not a state file, or has a different
            version or fingerprint.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise StateError(f"{path} is larger than {_MAX_BYTES:,} bytes. {_NEXT_STEP}")
        data = json.loads(raw)
    except StateError:
        raise
    except OSError as error:
        raise StateError(f"Cannot read {path}: {error.strerror or error}. {_NEXT_STEP}") from error
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path} is not valid JSON ({error}). {_NEXT_STEP}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise StateError(f"{path} is not a state file of the adaptive policy. {_NEXT_STEP}")
    if data.get("version") != VERSION:
        raise StateError(
            f"{path} has format version {data.get('version')!r}; only version {VERSION} can "
            "be read. To replace the file, pass its path to save()."
        )
    body = {"fingerprint": data.get("fingerprint"), "arms": data.get("arms")}
    if data.get("digest") != _digest(body):
        raise StateError(
            f"{path} was truncated or changed: its digest does not match. {_NEXT_STEP}"
        )
    if body["fingerprint"] != dict(fingerprint):
        raise StateError(
            f"The estimates in {path} were learned for the fingerprint {body['fingerprint']}, "
            f"not for {dict(fingerprint)}. Use a separate file for each fingerprint."
        )
    try:
        read = []
        for item in data["arms"]:
            regime = (str(item["clock"]), bool(item["queued"]))
            arm = Arm(_read_ident(item), history_size)
            arm.estimate(regime).restore(item["estimate"])
            read.append((arm.ident, regime, arm.estimates[regime]))
        return read
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = shortened(f"{type(error).__name__}: {error}")
        raise StateError(f"{path} contains an invalid arm ({why}). {_NEXT_STEP}") from error


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _facts(ident: ArmId) -> dict[str, Any]:
    if isinstance(ident, tuple):
        return {
            "graphs": [{"mode": key.mode.name, **attrs.asdict(key.descriptor)} for key in ident]
        }
    return {"eager": attrs.asdict(ident)}


def _read_ident(item: Mapping[str, Any]) -> ArmId:
    if "eager" in item:
        return _read_descriptor(item["eager"])
    keys = [
        GraphKey(RuntimeMode.parse(one["mode"]), _read_descriptor(one)) for one in item["graphs"]
    ]
    if not keys:
        raise ValueError("it has no graphs")
    return tuple(keys)


def _read_descriptor(facts: Mapping[str, Any]) -> BatchDescriptor:
    own = {name: value for name, value in facts.items() if name != "mode"}
    return BatchDescriptor(**{**own, "axes": tuple(own["axes"])})
