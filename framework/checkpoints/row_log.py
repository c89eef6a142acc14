"""Which rows the steps of a run trained on, in its record: a digest of them, or a file where no function gives them."""

import base64
import json
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..data import Loader, RowNumbers, whole_batches
from ..durable_files import refusal_of_disk
from ..errors import LoopscopeError
from ..firing import HookManager
from ..state import LoopState

ROWS = "rows.jsonl"
ENTRY = "rows"
"""The entry of a digest that stands for rows."""


def rows_entry(manager: HookManager, numbers: RowNumbers, since: int, step: int) -> dict[str, str]:
    """Return the digest of the rows of the steps after ``since`` up to ``step``; nothing where they are unknown."""
    with manager.state.streams.isolated():
        found = numbers.of_steps(since, step)
    return {} if found is None else {ENTRY: xxhash.xxh3_128_hexdigest(found.numpy().data)}


class RowLog:
    """Writes the rows of an epoch after its first step, unless a function gives them; the first process writes."""

    def __init__(self, folder: Path, manager: HookManager, numbers: RowNumbers) -> None:
        loader = whole_batches(manager.task.loader)
        has_order = isinstance(loader, Loader) and not loader.source_of_rows().by_function
        self._is_on = has_order and manager.task.ranks.is_main
        self._path, self._loader, self._streams = folder / ROWS, loader, manager.state.streams
        self._numbers = numbers
        self._epoch = -1

    def go_on(self, loop: LoopState) -> None:
        """Forget what comes after a checkpoint."""
        if self._is_on and self._path.is_file():
            begin = loop.epoch, loop.step - loop.epoch * len(self._loader)
            kept = [line for line in _lines(self._path) if (line["epoch"], line["start"]) < begin]
            with refusal_of_disk(self._path):
                self._path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def pause(self, loop: LoopState, *, step_ended: bool) -> None:
        """Write the rows of an epoch, from its first batch that this run trains on."""
        if not (self._is_on and step_ended and loop.epoch != self._epoch):
            return
        self._epoch, start = loop.epoch, loop.step - 1 - loop.epoch * len(self._loader)
        with self._streams.isolated():
            batches = [*(self._loader.row_indices(loop.epoch, start) or ())]
        self._numbers.know(loop.epoch, start, batches)  # so that nobody asks the sampler once more
        sizes = [[size, len([*group])] for size, group in groupby(map(len, batches))]
        line = {"epoch": loop.epoch, "start": start, "sizes": sizes, "rows": _packed(batches)}
        try:
            with refusal_of_disk(self._path), self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except LoopscopeError as error:
            self._is_on = False
            warnings.warn(f"{error} The run goes on without the rows of its steps.", stacklevel=3)


def rows_of(folder: Path, loader: Loader, step: int) -> Tensor | None:
    """Return the rows of a step of the run in ``folder``, counted from 1, whose data ``loader`` gives.

    They are those of the loader's function or, where somebody's own sampler draws the order, of the file in the record;
    int64 of shape (rows,), ``None`` where nobody knows them.
    """
    epoch, batch = divmod(step - 1, len(loader))
    path, found = folder / ROWS, None
    if not loader.source_of_rows().by_function and path.is_file():
        for line in _lines(path):  # a run that went on within an epoch has written the rest of it once more
            if line["epoch"] == epoch and line["start"] <= batch:
                found = _unpacked(line, batch - line["start"])
    return RowNumbers(loader).of_step(step) if found is None else found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file as far as they are whole."""
    for text in path.read_text("utf-8", "replace").splitlines():
        try:
            line = json.loads(text)
            if {*line} != {"epoch", "start", "sizes", "rows"}:
                return
        except (ValueError, TypeError):
            return
        yield line


def _packed(batches: Sequence[Tensor]) -> str:
    """Return rows as text: their bytes by place value, most of which are zero or alike, compressed."""
    rows = torch.cat([*batches, torch.empty(0, dtype=torch.int64)]).numpy().astype("<i8")
    planes = rows.view(np.uint8).reshape(-1, 8).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 1)).decode()


def _unpacked(line: Mapping[str, Any], batch: int) -> Tensor | None:
    planes = np.frombuffer(zlib.decompress(base64.b64decode(line["rows"])), np.uint8).reshape(8, -1)
    rows = np.ascontiguousarray(planes.T).reshape(-1).view("<i8").astype(np.int64)
    sizes = [size for size, count in line["sizes"] for _ in range(count)]
    return torch.from_numpy(rows).split(sizes)[batch] if batch < len(sizes) else None  # type: ignore[no-untyped-call]
