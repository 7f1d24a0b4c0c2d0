"""Backends are found by name; errors list the available names."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from dispatchkit.backends import BUILT_IN_BACKENDS, GraphBackend, resolve_backend
from dispatchkit.errors import BackendUnavailableError, ConfigError, UnknownNameError


class Plugged:
    """A fake backend of a plugin."""

    def __init__(self, device=None):
        self.device = device


def test_importing_the_package_loads_no_torch():
    program = "import sys, dispatchkit.backends; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("spec", ["tape", "cpu"])
def test_the_tape_goes_by_two_names(spec):
    pytest.importorskip("torch")
    backend = resolve_backend(spec)
    assert backend.name == "tape"
    assert backend.torch_device == "cpu"
    assert resolve_backend("tape", device="cpu").name == "tape"


def test_auto_is_the_tape_without_a_device_and_says_so(caplog):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    with caplog.at_level(logging.INFO, logger="dispatchkit.backends.resolve"):
        assert resolve_backend("auto").name == "tape"
    assert "'tape'" in caplog.text


def test_an_object_is_returned_as_it_is():
    pytest.importorskip("torch")
    backend = resolve_backend("tape")
    assert resolve_backend(backend) is backend


def test_an_object_that_is_no_backend_is_refused_with_what_it_lacks():
    with pytest.raises(ConfigError, match="capture") as caught:
        resolve_backend(3)
    assert caught.value.setting == "backend"


def test_an_unknown_name_lists_the_nearest_ones():
    with pytest.raises(UnknownNameError) as caught:
        resolve_backend("cuad", registered={"metal": Plugged})
    assert "cuda" in caught.value.nearest
    assert set(caught.value.known) >= {*BUILT_IN_BACKENDS, "auto", "metal"}


def test_a_registered_backend_is_made_with_the_device():
    backend = resolve_backend("metal", device=1, registered={"metal": Plugged})
    assert isinstance(backend, Plugged)
    assert backend.device == 1


@pytest.mark.parametrize(("spec", "device"), [("tape", None), ("cpu", None), ("auto", "cpu")])
def test_one_registered_under_a_built_in_name_takes_its_place(spec, device):
    pytest.importorskip("torch")
    backend = resolve_backend(spec, device=device, registered={"tape": Plugged})
    assert isinstance(backend, Plugged)
    assert backend.device == device


@pytest.mark.parametrize(
    ("spec", "device"), [("tape", "cuda:0"), ("tape", 0), ("cuda:1", 2), ("cuda:1", "cuda:0")]
)
def test_a_device_that_contradicts_the_name_is_refused(spec, device):
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="device"):
        resolve_backend(spec, device=device)


def test_a_device_beside_an_object_is_refused():
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="device"):
        resolve_backend(resolve_backend("tape"), device="cpu")


def test_cuda_without_a_device_is_unavailable_and_names_the_way_out():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    with pytest.raises(BackendUnavailableError, match="'tape'"):
        resolve_backend("cuda")


def test_without_torch_the_error_has_the_install_line():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from dispatchkit.backends import resolve_backend\n"
        "from dispatchkit.errors import BackendUnavailableError\n"
        "try:\n    resolve_backend('tape')\n"
        "except BackendUnavailableError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'dispatchkit[torch]'" in done.stdout


def test_the_built_in_backends_fit_the_protocol():
    pytest.importorskip("torch")
    backend: GraphBackend = resolve_backend("tape")
    members = [name for name in vars(GraphBackend) if not name.startswith("_")]
    assert [name for name in members if not hasattr(backend, name)] == []
