"""Packages that only one sink needs."""

from framework import optional


def require_package(package: str, sink: str) -> None:
    """Raise :class:`UsageError` that says how to get ``package``, the extra of loopscope that ``sink`` needs.

    A mere folder of that name, such as W&B makes, is none.
    """
    optional.require_package(package, f"Sink {sink!r}", package)
