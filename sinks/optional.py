"""Packages that only one sink needs."""

from importlib.util import find_spec

from framework.errors import UsageError


def require_package(package: str, sink: str) -> None:
    """Raise :class:`UsageError` that says how to get ``package``, the extra of loopscope that ``sink`` needs.

    A mere folder of that name, such as W&B makes, is none: it has no origin.
    """
    found = find_spec(package)
    if found is None or found.origin is None:
        raise UsageError(
            f"Sink {sink!r} needs the package {package}, which is not installed: pip install 'loopscope[{package}]'."
        )
