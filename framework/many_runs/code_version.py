"""The version of the code that computes indexed values."""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from platform import python_version

import numpy as np
import xxhash

from ..doctor import DetectorRegistry
from ..hooks import SinkRegistry

PACKAGE = __name__.partition(".")[0]
PARTS = ("", ".sinks", ".training_hooks")
"""The packages of loopscope on which indexed values depend."""


def code_version() -> str | None:
    """Return a digest of loopscope's files, detectors and sinks; ``None`` if a detector or sink has no file.

    Sizes and times of the files stand for their content, so that an edited checkout has another version.
    """
    import_module("loopscope.doctor.detectors")  # registers the shipped ones
    modules = {kind.__module__ for registry in (DetectorRegistry, SinkRegistry) for kind in registry}
    others = [getattr(sys.modules[name], "__file__", None) for name in modules if name.partition(".")[0] != PACKAGE]
    if None in others:  # defined at a prompt or in a notebook
        return None
    added = [_stamp(Path(path)) for path in others if path is not None]
    return xxhash.xxh3_64_hexdigest(repr((_shipped(), sorted(added))).encode())


@cache
def _shipped() -> tuple[object, ...]:
    folders = [folder for part in PARTS if (spec := find_spec(PACKAGE + part)) for folder in _folders(spec)]
    paths = sorted({path for folder in folders for path in Path(folder).rglob("*.py")})
    return (python_version(), np.__version__, *map(_stamp, paths))


def _folders(spec: object) -> list[str]:
    return list(getattr(spec, "submodule_search_locations", None) or ())


def _stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns
