"""Scripting of modules with taps: torch.jit.script would compile their hooks, which are no part of the model."""

from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from ..state import InternalHook


@cache
def leave_taps_out_of_scripts() -> None:
    """Hide internal module hooks from torch.jit.script from now on; further calls do nothing."""
    # Private: no public function of torch.jit leaves out a hook. torch 2.9 to 2.15 have this one.
    recursive: Any = torch.jit._recursive
    stubs_of_hooks = getattr(recursive, "get_hook_stubs", None)
    if stubs_of_hooks is None:
        return

    @wraps(stubs_of_hooks)
    def stubs_without_taps(module: nn.Module) -> Any:
        tables = (module._forward_hooks, module._forward_pre_hooks)
        entries = [dict(table) for table in tables]
        try:
            for table in tables:
                for key in [key for key, hook in table.items() if isinstance(hook, InternalHook)]:
                    del table[key]
            return stubs_of_hooks(module)
        finally:
            for table, earlier in zip(tables, entries, strict=True):
                table.clear()
                table.update(earlier)

    recursive.get_hook_stubs = stubs_without_taps
