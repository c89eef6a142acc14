"""Rows of the matrix: a training, the packages that it needs, and the results that it may have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation 2": {"accumulate": 2},
    "clipping": {"clip": 0.05},
    "evaluation": {"evaluates": True},
}
"""The variants that every kind of loop has: arguments of its training."""
ROWS: "dict[str, Row]" = {}


class Attach(Protocol):
    """Attaches hooks to a training, as ``loopscope.attach`` does; for a bare training it attaches nothing."""

    is_bare: bool

    def __call__(self, target: Any, optimizer: Any = None, **options: Any) -> Any:
        """Return a scope; that of a bare training runs the plain calls of torch."""


@dataclass(frozen=True)
class Row:
    """A training of a few steps.

    ``ranks`` is the number of processes. A ``control`` must differ, which shows that differences are found.
    """

    group: str
    variant: str
    train: Callable[[Attach], None]
    packages: tuple[str, ...] = ()
    ranks: int = 1
    control: bool = False

    @property
    def name(self) -> str:
        """The name for ``--only``."""
        return f"{self.group}: {self.variant}" if self.variant else self.group

    @property
    def absent(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.packages if not installed(name)]

    @property
    def versions(self) -> str:
        """The packages with their versions."""
        return ", ".join(f"{name} {installed(name)}" for name in self.packages)


def installed(package: str) -> str:
    """Return the version of a package, or an empty text if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def rows(
    group: str, *packages: str, variants: Mapping[str, Mapping[str, Any]] = VARIANTS, **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a row for each variant; ``settings`` are further fields of :class:`Row`."""

    def register(train: Callable[..., None]) -> Callable[..., None]:
        for variant, options in variants.items():
            row = Row(group, variant, partial(train, **options), packages, **settings)
            assert row.name not in ROWS, row.name
            ROWS[row.name] = row
        return train

    return register


def row(
    group: str, variant: str, *packages: str, **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register one row."""
    return rows(group, *packages, variants={variant: {}}, **settings)
