"""Names that packages load on first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dispatchkit import observe, plugins


@pytest.mark.parametrize("package", [observe, plugins])
def test_every_public_name_is_listed_and_found_and_others_are_refused(package) -> None:
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'x'"):
        _ = package.x


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, "torch is not installed. Run: pip install 'dispatchkit[torch]'"),
        ("raise ImportError('no libcudart.so')", "raised an error: no libcudart.so. Fix"),
    ],
    ids=["missing", "broken"],
)
def test_names_that_need_torch_say_why_it_is_unavailable(
    tmp_path: Path, module: str | None, said: str
) -> None:
    if module is not None:
        (tmp_path / "torch.py").write_text(module)
    hidden = "sys.modules['torch'] = None" if module is None else ""
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {hidden}\n"
        "try:\n    from dispatchkit import graphed\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert said in done.stdout


def test_a_name_is_looked_up_once(monkeypatch) -> None:
    monkeypatch.delitem(vars(observe), "Timeline", raising=False)
    found = observe.Timeline
    assert vars(sys.modules["dispatchkit.observe"])["Timeline"] is found
