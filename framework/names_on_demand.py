"""Interfaces of packages whose names are imported when they are first used."""

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_on_demand(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its names only under ``if TYPE_CHECKING:``.

    Importing the package then imports none of its modules, most of which import torch, which takes over a second. The
    names come from the import statements that type checkers read, so that no second table can differ from them.
    """
    interface = ast.parse(inspect.getsource(sys.modules[package]))
    statements = [node for node in ast.walk(interface) if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: f"{'.' * node.level}{node.module}" for node in statements for alias in node.names}

    def imported(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = vars(sys.modules[package])[name] = getattr(import_module(modules[name], package), name)
        return value

    return imported
