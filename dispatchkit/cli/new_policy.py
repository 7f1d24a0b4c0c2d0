"""``new-policy``: create an installable distribution with a policy and its tests."""

from __future__ import annotations

import keyword
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from dispatchkit._version import __version__
from dispatchkit.cli.options import load_installed_plugins
from dispatchkit.cli.output import JsonOption, print_json
from dispatchkit.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST_NAME = 100  # file systems allow 255 bytes, and package tools add a suffix

#: Template files, and the path at which each is written in the new distribution. ``{package}`` is
#: the name of the Python package.
_FILES = {
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "__init__.py.in": "src/{package}/__init__.py",
    "plugin.py.in": "src/{package}/plugin.py",
}
#: The files of the rule and its tests, keyed by whether the policy learns.
_RULE = {
    False: {
        "policy.py.in": "src/{package}/policy.py",
        "test_policy.py.in": "tests/test_policy.py",
    },
    True: {
        "learning_policy.py.in": "src/{package}/policy.py",
        "test_learning_policy.py.in": "tests/test_policy.py",
    },
}
#: The rule's summary and the methods that implement it, keyed by whether the policy learns.
_DESCRIPTIONS = {
    False: ("Smallest graph that covers the batch", "`decide`"),
    True: ("Smallest graph, or eager if that is faster", "`decide` and `observe`"),
}


def new_policy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name that selects the policy.")],
    directory: Annotated[
        Path,
        typer.Option(
            "--directory", metavar="FOLDER", help="Folder in which to create dispatchkit-NAME."
        ),
    ] = Path(),
    learning: Annotated[
        bool,
        typer.Option(
            "--learning", metavar="", help="Create a policy that learns from measured steps."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Create a distribution with a new policy, ready to install and test.

    Example: dispatchkit new-policy smallest
    """
    taken = load_installed_plugins().policies.get(name)
    if taken is not None:
        message = f"Policy name {name!r} is already used ({taken.origin}). Choose a different name."
        raise ConfigError("NAME", name, "a name that is not in use", message=message)
    made = write_distribution(name, directory, learning=learning)
    steps = [
        f"cd {shlex.quote(str(made))}",
        "pip install -e '.[testing]'",
        "pytest",
        f"dispatchkit explain 13 --policy {name}",
    ]
    if as_json:
        written = sorted(path for path in made.rglob("*") if path.is_file())
        print_json(
            {
                "policy": name,
                "folder": str(made),
                "files": [path.relative_to(made).as_posix() for path in written],
                "next": steps,
            }
        )
        return
    print(f"Wrote {made}, with the policy {name!r}. Next:")
    for step in steps:
        print(f"  {step}")


def write_distribution(name: str, directory: Path, *, learning: bool = False) -> Path:
    """Write the files of a new distribution and return its folder.

    Args:
        name: Name of the policy: lower-case letters and digits, with single hyphens between them,
            beginning with a letter.
        directory: Folder in which to create the folder of the distribution.
        learning: Whether the policy learns from measured steps.

    Raises:
        ConfigError: The name is invalid, or the folder exists or cannot be written.
    """
    package = "dispatchkit_" + name.replace("-", "_")
    if not _NAME.fullmatch(name):
        allowed = (
            "made of lower-case letters and digits, with single hyphens between them, and begin "
            "with a letter"
        )
        raise ConfigError("NAME", name, allowed)
    if len(name) > _LONGEST_NAME:
        raise ConfigError("NAME", name, f"at most {_LONGEST_NAME} characters long")
    if keyword.iskeyword(name):
        raise ConfigError("NAME", name, "a name other than a Python keyword")
    if name.startswith("dispatchkit-"):
        hint = f"Use {name.partition('-')[2]!r}. The prefix is added to the distribution's name."
        raise ConfigError("NAME", name, "a name without the prefix dispatchkit-", hint)
    target = directory / f"dispatchkit-{name}"
    if os.path.lexists(target):
        message = f"{str(target)!r} already exists. Choose a different name or --directory."
        raise ConfigError(
            "NAME", name, f"a name for which {target} does not exist", message=message
        )
    facts = {
        "name": name,
        "distribution": f"dispatchkit-{name}",
        "package": package,
        "class_name": "".join(part.capitalize() for part in name.split("-")) + "Policy",
        "version": __version__,
    }
    facts["summary"], facts["methods"] = _DESCRIPTIONS[learning]
    part: Path | None = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Write to a temporary folder and rename it at the end.
        part = Path(tempfile.mkdtemp(prefix=".new-policy-", suffix=".part", dir=directory))
        part.chmod(0o777 & ~_umask())
        for template, where in (_FILES | _RULE[learning]).items():
            path = part / where.format(package=package)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_filled(template, facts), encoding="utf-8")
        (part / "src" / package / "py.typed").touch()
        part.rename(target)
    except BaseException as error:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            allowed = f"a folder in which {target.name} can be created"
            message = (
                f"{target.name} cannot be created in {str(directory)!r}: {error.strerror}. "
                "Choose a different --directory."
            )
            raise ConfigError("directory", str(directory), allowed, message=message) from error
        raise
    return target


def _umask() -> int:
    """Return the umask of the process."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _filled(template: str, facts: Mapping[str, str]) -> str:
    source = files("dispatchkit.cli") / "new_policy_files" / template
    return Template(source.read_text(encoding="utf-8")).substitute(facts)
