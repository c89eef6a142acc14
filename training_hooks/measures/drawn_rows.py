"""Rows to measure on, drawn by a seed that no order changes, so that orders are compared on equal terms."""

from loopscope.data import Loader
from loopscope.errors import LoopscopeError, shortened

from .alerts import notice

ROWS_SEED = 0  # of the draw; the same in every run, so that equal weights have equal numbers


def drawn_loader(hook: str, loader: Loader) -> Loader:
    """Return the rows of ``loader`` in an order that does not depend on its own, or ``loader`` with a notice."""
    try:
        return loader.drawn(ROWS_SEED)
    except (LoopscopeError, NotImplementedError, TypeError) as error:
        notice(
            f"Hook {hook!r} measures the first rows of the run's own order, which another order does not share: "
            f"{shortened(str(error), 150)}"
        )
        return loader
