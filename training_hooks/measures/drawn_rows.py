"""Rows to measure on, drawn with a fixed seed, so that measurements do not depend on the order of the data."""

from loopscope.data import Loader
from loopscope.errors import LoopscopeError, shortened

from .alerts import notice

ROWS_SEED = 0  # seed of the draw; the same in every run, so that equal weights give equal numbers


def drawn_loader(hook: str, loader: Loader) -> Loader:
    """Return the rows of ``loader`` in an order that is independent of the run's order.

    If the loader cannot draw them, issue a notice and return ``loader`` itself.
    """
    try:
        return loader.drawn(ROWS_SEED)
    except (LoopscopeError, NotImplementedError, TypeError) as error:
        notice(
            f"Hook {hook!r} measures the first rows in the run's order, so runs with other orders measure other rows: "
            f"{shortened(str(error), 150)}"
        )
        return loader
