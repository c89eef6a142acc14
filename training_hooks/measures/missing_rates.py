"""A check of the learning rates that a hook needs."""

import math
from collections.abc import Sequence

from loopscope.errors import UnsuitableError
from loopscope.hooks import OptimizerGroup


def refuse_missing_rates(hook: str, verb: str, groups: Sequence[OptimizerGroup]) -> None:
    """Raise :class:`UnsuitableError` if a parameter group has no numeric learning rate.

    Args:
        hook: the hook's name.
        verb: what the hook does to learning rates, such as ``"reads"``.
        groups: the groups that the hook needs.
    """
    for index, group in enumerate(groups):
        if math.isnan(group.lr):
            value = f"lr={group.options['lr']!r}" if "lr" in group.options else "no lr"
            raise UnsuitableError(
                f"Hook {hook!r} {verb} learning rates, but parameter group {index} of {group.optimizer_class.__name__} "
                f"has {value}; leave the hook out, or give the optimizer a numeric learning rate."
            )
