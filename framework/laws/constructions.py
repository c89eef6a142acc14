"""Modules that are constructed again with their arguments, which ``loopscope check`` notes for every module."""

import random
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from ..preserved_streams import preserved_streams
from .rows import UndecidedError

NOTED = "_loopscope_arguments"
"""The attribute of ``nn.Module`` with a weak reference and the arguments of each module, by the module's id.

``watch_site/sitecustomize.py`` sets it.
"""
SEED = 20250607
"""Another seed than that of the script, so that numbers drawn by a constructor differ."""
MOST_PARAMETERS = 300_000_000


def constructed_again(module: nn.Module) -> nn.Module:
    """Return a new module of the same class, constructed with the same arguments and other random numbers.

    Raises:
        UndecidedError: the arguments are unknown, or the constructor refuses them.
    """
    if sum(item.numel() for item in module.parameters()) > MOST_PARAMETERS:
        raise UndecidedError("the model is too large to be constructed again")
    device = next((item.device for item in module.parameters()), torch.device("cpu"))
    try:
        with preserved_streams(), redirect_stdout(StringIO()):
            torch.manual_seed(SEED)
            random.seed(SEED)
            return _new(module, {}).to(device)
    except UndecidedError:
        raise
    except Exception as error:
        raise UndecidedError(f"the model cannot be constructed again ({type(error).__name__})") from error


def _new(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    noted: Mapping[int, Any] = getattr(nn.Module, NOTED, {})
    if id(module) not in known:
        if id(module) not in noted:
            raise UndecidedError("the arguments of its constructor are unknown")
        inputs, options = noted[id(module)][1]
        made = type(module)(*_copied(inputs, known), **_copied(options, known))
        assert isinstance(made, nn.Module)
        known[id(module)] = made
    return known[id(module)]


def _copied(value: Any, known: dict[int, nn.Module]) -> Any:
    """Return arguments with new modules and copies of tensors, which loading a state dict would change."""
    if isinstance(value, nn.Module):
        return _new(value, known)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().clone(), value.requires_grad)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(item, known) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _copied(item, known)) for key, item in value.items())
    return value
