"""Row numbers of the training steps in a run's record: as digests, or as a file if they cannot be recomputed."""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..data import Loader, RowNumbers, global_batches
from ..durable_files import translated_disk_errors
from ..engine import HookManager
from ..errors import LoopscopeError, warn
from ..state import LoopState

ROWS = "rows.jsonl"
ENTRY = "rows"
"""Name of the digest entry for rows."""


def rows_entry(manager: HookManager, numbers: RowNumbers, since: int, step: int) -> dict[str, str]:
    """Return the digest of the rows of the steps after ``since`` up to ``step``; empty if the rows are unknown."""
    with manager.state.streams.preserved():
        rows = numbers.of_steps(since, step)
    return {} if rows is None else {ENTRY: xxhash.xxh3_128_hexdigest(rows.numpy().data)}


class RowLog:
    """Writes the rows of each epoch after its first step, on the main rank, unless a function can recompute them."""

    def __init__(self, folder: Path, manager: HookManager, numbers: RowNumbers) -> None:
        loader = global_batches(manager.task.loader)
        has_order = isinstance(loader, Loader) and not loader.source_of_rows().by_function
        self._is_on = has_order and manager.task.ranks.is_main
        self._path, self._loader, self._streams = folder / ROWS, loader, manager.state.streams
        self._numbers = numbers
        self._epoch = -1

    def truncate_to(self, loop: LoopState) -> None:
        """Remove the lines that were written after a checkpoint."""
        if self._is_on and self._path.is_file():
            position = loop.epoch, loop.step - loop.epoch * len(self._loader)
            earlier_lines = [line for line in _lines(self._path) if (line["epoch"], line["start"]) < position]
            with translated_disk_errors(self._path):
                self._path.write_text("".join(json.dumps(line) + "\n" for line in earlier_lines))

    def pause(self, loop: LoopState, *, step_ended: bool) -> None:
        """Write the rows of an epoch from the first batch that this run trains on."""
        if not (self._is_on and step_ended and loop.epoch != self._epoch):
            return
        self._epoch, start = loop.epoch, loop.step - 1 - loop.epoch * len(self._loader)
        with self._streams.preserved():
            batches = [*(self._loader.row_indices(loop.epoch, start) or ())]
        self._numbers.cache_rows(loop.epoch, start, batches)  # so that the sampler is not asked again
        sizes = [[size, len([*group])] for size, group in groupby(map(len, batches))]
        line = {"epoch": loop.epoch, "start": start, "sizes": sizes, "rows": _pack(batches)}
        try:
            with translated_disk_errors(self._path), self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except LoopscopeError as error:
            self._is_on = False
            warn(f"{error} The run continues without recording the rows of its steps.", stacklevel=3)


def rows_of_step(folder: Path, loader: Loader, step: int) -> Tensor | None:
    """Return the row numbers of a step, counted from 1, of the run in ``folder`` that trains on ``loader``.

    If a custom sampler draws the order, they come from the file in the run's record, otherwise from the loader's
    function. The result is int64 of shape (rows,), or ``None`` if the rows are unknown.
    """
    epoch, batch = divmod(step - 1, len(loader))
    path, rows = folder / ROWS, None
    if not loader.source_of_rows().by_function and path.is_file():
        for line in _lines(path):  # the last match counts: a run resumed within an epoch has written its rest again
            if line["epoch"] == epoch and line["start"] <= batch:
                rows = _unpack(line, batch - line["start"])
    return RowNumbers(loader).of_step(step) if rows is None else rows


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file up to the first damaged one."""
    for text in path.read_text("utf-8", "replace").splitlines():
        try:
            line = json.loads(text)
            if {*line} != {"epoch", "start", "sizes", "rows"} or {int} != {type(line["epoch"]), type(line["start"])}:
                return
        except (ValueError, TypeError, RecursionError):
            return
        yield line


def _pack(batches: Sequence[Tensor]) -> str:
    """Return row numbers as text, compressed by byte planes."""
    # The eight bytes of all numbers are stored by significance: high bytes are mostly zero, so they compress well.
    rows = torch.cat([*batches, torch.empty(0, dtype=torch.int64)]).numpy().astype("<i8")
    planes = rows.view(np.uint8).reshape(-1, 8).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 1)).decode()


def _unpack(line: Mapping[str, Any], batch: int) -> Tensor | None:
    """Return the row numbers of one batch of a line, or ``None`` if the line does not reach it or is damaged."""
    try:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(line["rows"])), np.uint8).reshape(8, -1)
        rows = torch.from_numpy(np.ascontiguousarray(planes.T).reshape(-1).view("<i8").astype(np.int64))
        sizes = [size for size, count in line["sizes"] for _ in range(count)]
        return rows.split(sizes)[batch] if batch < len(sizes) else None  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, zlib.error, RuntimeError):  # a damaged line
        return None
