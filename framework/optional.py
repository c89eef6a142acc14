"""Packages that only a part of loopscope needs."""

from importlib.util import find_spec

from framework.errors import UsageError


def require_package(package: str, needed_by: str, extra: str) -> None:
    """Raise :class:`UsageError` that says how to get ``package`` with an extra of loopscope, if it is missing.

    A mere folder of that name is none: it has no origin.
    """
    found = find_spec(package)
    if found is None or found.origin is None:
        raise UsageError(
            f"{needed_by} needs the package {package}, which is not installed: pip install 'loopscope[{extra}]'."
        )
