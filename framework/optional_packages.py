"""Packages that only parts of loopscope need: the check that they are installed, and the command that installs them."""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from .errors import UsageError


def require_package(package: str, needed_by: str) -> None:
    """Raise :class:`UsageError` with installation advice if ``package`` is missing.

    A folder of that name (a namespace package) is not accepted; it has no origin.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        command = install_command(package)
        raise UsageError(f"{needed_by} needs the package {package}, which is not installed: {command}.")


def installed_version(package: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def extra_command(extra: str) -> str:
    """Return the command that installs the packages of an extra; pip takes loopscope as it is installed."""
    return f'pip install "loopscope[{extra}]"'


def install_command(package: str) -> str:
    """Return the command that installs an optional package, in the versions that loopscope accepts.

    >>> install_command("matplotlib"), install_command("unknown")
    ("pip install 'matplotlib>=3.9'", 'pip install unknown')
    """
    try:
        requirements = requires("loopscope") or []
    except PackageNotFoundError:  # imported from a folder without installation
        requirements = []
    for requirement in requirements:
        match = re.match(r"(?P<name>[\w.-]+)(?P<versions>[^;\s]*)", requirement)
        if match and match["name"].replace("-", "_") == package.replace("-", "_") and match["versions"]:
            return f"pip install '{match[0]}'"
    return f"pip install {package}"
