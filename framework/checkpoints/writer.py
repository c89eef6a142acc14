"""Background writing of checkpoints: from a copy of the state, in a separate thread, keeping only a few."""

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..state.values import ATOMS, STORED_DICTS, dict_like
from ..tensors import completed, dtensor_class, is_sharded, local_shards
from ..training import Ranks
from .format import Checkpoint, checkpoint_name, intact_checkpoints, remove_leftovers, set_aside, write_checkpoint

Buffers = dict[tuple[Any, ...], list[Tensor]]


class Staging:
    """Copies nested values and their tensors to the CPU; buffers of matching shape, strides and dtype are reused."""

    def __init__(self) -> None:
        self._spare: Buffers = {}
        self._used: Buffers = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.uncopied_types: set[type] = set()
        """Classes of the values that were not copied and are not plain."""

    @torch.no_grad()
    def copy(self, content: Any) -> Any:
        """Return a copy that shares no memory with the original, except for values of ``uncopied_types``."""
        self._spare, self._used, self._pairs = self._used, {}, []
        self.uncopied_types.clear()
        copied = self._copied(content)
        if self._pairs:
            buffers, originals = zip(*self._pairs, strict=True)
            # Into reused buffers, 100 million float32 numbers take 28 ms; new memory takes 180 ms (page faults).
            torch._foreach_copy_(list(buffers), list(originals))
        self._spare, self._pairs = {}, []
        return copied

    def _copied(self, value: Any) -> Any:
        """Copy the containers, and pair each tensor with the buffer that it will be copied into."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is dict:
            return {name: self._copied(item) for name, item in value.items()}
        if kind in STORED_DICTS:
            return dict_like(value, [self._copied(item) for item in value.values()])
        if kind in (list, tuple, set):
            return kind([self._copied(item) for item in value])
        if not isinstance(value, Tensor):
            self.uncopied_types.add(kind)
            return value
        if is_sharded(value):
            complete: Any = completed(value)
            (local,) = local_shards([complete])
            # Private constructor and `_spec`: DTensor.from_local would move the copy to the devices of the mesh.
            return dtensor_class()(self._buffer_for(local), complete._spec, requires_grad=False)
        if value.layout is not torch.strided:  # other layouts have neither strides nor foreach kernels
            return value.detach().clone().cpu()
        return self._buffer_for(value)

    def _buffer_for(self, tensor: Tensor) -> Tensor:
        # Strides determine the order of summation in later reductions over the tensor, and with it the last bits.
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        spare = self._spare.get(key)
        buffer = spare.pop() if spare else torch.empty_like(tensor, device="cpu", requires_grad=False)
        self._used.setdefault(key, []).append(buffer)
        self._pairs.append((buffer, tensor))
        return buffer


@dataclass
class RetainedCheckpoints:
    """The checkpoints that a run keeps: the newest ``number``, and the best."""

    number: int
    _scores: dict[Path, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, number: int) -> "RetainedCheckpoints":
        """Start with the intact checkpoints of a folder, and remove incomplete ones that a crash has left."""
        remove_leftovers(folder)
        return cls(number, {checkpoint.folder: checkpoint.score for checkpoint in intact_checkpoints(folder)})

    def removed(self) -> list[Path]:
        """Drop and return the checkpoints that something else has removed in the meantime."""
        missing = [path for path in self._scores if not path.is_dir()]
        for path in missing:
            del self._scores[path]
        return missing

    def add(self, checkpoint: Checkpoint) -> list[Path]:
        """Add a new checkpoint, and return the ones to remove.

        Checkpoints of later steps, left by a run that was resumed from an earlier one, are neither counted nor removed.
        """
        self._scores.pop(checkpoint.folder, None)
        self._scores[checkpoint.folder] = checkpoint.score
        past = {path: score for path, score in self._scores.items() if path.name <= checkpoint.folder.name}
        newest = sorted(past, key=attrgetter("name"))[-self.number :]
        scored = {path: score for path, score in past.items() if score is not None and score == score}  # no NaN
        best = {min(scored, key=scored.__getitem__)} if scored else set()
        superseded = [path for path in past if path not in newest and path not in best]
        for path in superseded:
            del self._scores[path]
        return superseded


class CheckpointWriter:
    """Writes one checkpoint at a time into a folder."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks | None = None) -> None:
        self._folder = folder
        self._keep = keep
        self._ranks = ranks or Ranks()
        self._kept: RetainedCheckpoints | None = None
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []
        self._spare: Path | None = None
        self.step = 0
        """The step of the last checkpoint whose writing has started."""

    @property
    def is_busy(self) -> bool:
        """Whether the last checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(
        self, step: int, staged: Mapping[str, Any], manifest: Mapping[str, Any], sync_first: Sequence[Path]
    ) -> None:
        """Start writing in a thread; the files ``sync_first`` are synced before the checkpoint becomes valid."""
        folder, self.step = self._folder / checkpoint_name(step), step
        # Not a daemon thread, so that the interpreter waits at exit until the checkpoint is written.
        arguments = (folder, staged, manifest, sync_first)
        self._thread = threading.Thread(target=self._write, args=arguments, name="loopscope checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait until nothing is being written, and remove incomplete checkpoints, also those of earlier crashes."""
        self.wait()
        self._spare = None
        if self._ranks.is_main:
            self._note_removed()
            remove_leftovers(self._folder)

    def failures(self) -> list[str]:
        """Return the failures since the last call: checkpoints not written, not removed, or removed from outside."""
        failures, self._failures = self._failures, []
        return failures

    def _note_removed(self) -> None:
        removed = [] if self._kept is None else self._kept.removed()
        self._failures += [f"The checkpoint {path} was removed during the run." for path in removed]

    def _write(
        self, folder: Path, staged: Mapping[str, Any], manifest: Mapping[str, Any], sync_first: Sequence[Path]
    ) -> None:
        try:
            spare, self._spare = self._spare, None
            if self._ranks.are_many:
                from .rank_checkpoints import write_parts  # imported here, as it takes a second

                written = write_parts(folder, staged, manifest, sync_first, spare, self._ranks)
            else:
                written = write_checkpoint(folder, staged, manifest, sync_first, spare)
        except Exception as error:
            self._failures.append(str(error))
            return
        if not self._ranks.is_main:
            return
        try:
            self._kept = self._kept or RetainedCheckpoints.of(self._folder, self._keep)
            self._note_removed()
            for path in self._kept.add(written):
                if self._spare is not None:
                    shutil.rmtree(self._spare, ignore_errors=True)
                self._spare = set_aside(path)
        except Exception as error:  # raised in this thread, it would not reach the run
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._failures.append(f"An old checkpoint in {self._folder} could not be removed: {reason}.")
