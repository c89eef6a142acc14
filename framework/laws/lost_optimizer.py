"""The violation of an optimizer whose parameters get no gradient, since another module is trained."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import listed
from .law import broken
from .session import FILE, LEARNS, LawCheck


def report_lost_optimizer(modules: Iterable[nn.Module], options: Mapping[str, Any], out: str) -> bool:
    """Write the results of a check in which no other law can be tried, and return whether the law was selected.

    Args:
        modules: the modules with gradients.
        options: the options of the hook ``laws``.
        out: the folder of the run.
    """
    import_module("loopscope.laws.shipped")
    check = LawCheck(options.get("only", ()))
    names = [name for module in modules for name, item in module.named_parameters() if item.grad is not None]
    if not names or LEARNS not in check:
        return False
    sentence = (
        f"{listed(names, 3)} have gradients and are in no optimizer; no parameter of the optimizer has one, as of a "
        "copy, or of layers that were replaced"
    )
    check.add(LEARNS, 1, broken(sentence, names))
    check.write(Path(out, FILE), len(check), len(check), "end")
    return True
