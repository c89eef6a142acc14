"""Writes checkpoints beside the training: from a copy of its own, in a thread of its own, keeping but a few."""

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..state import ATOMS, completed, dtensor_class, is_sharded, local_shards
from ..training import Ranks
from .format import Checkpoint, checkpoint_name, intact_in, remove_leftovers, set_aside, write_checkpoint

Buffers = dict[tuple[Any, ...], list[Tensor]]


class Staging:
    """Copies nested values with their tensors, on the CPU; the buffers are reused where shape and type still fit."""

    def __init__(self) -> None:
        self._spare: Buffers = {}
        self._used: Buffers = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.foreign: set[type] = set()
        """Classes of the values that were not copied, beyond those of plain values."""

    @torch.no_grad()
    def copy(self, content: Any) -> Any:
        """Return a copy that shares nothing with the original, nor with it after its next change."""
        self._spare, self._used, self._pairs = self._used, {}, []
        self.foreign.clear()
        copied = self._copied(content)
        if self._pairs:
            buffers, originals = zip(*self._pairs, strict=True)
            torch._foreach_copy_(list(buffers), list(originals))
        self._spare, self._pairs = {}, []
        return copied

    def _copied(self, value: Any) -> Any:
        """Copy the containers, and note which tensor is to be copied into which buffer."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is dict or isinstance(value, Mapping):
            return {name: self._copied(item) for name, item in value.items()}
        if kind in (list, tuple, set):
            return kind([self._copied(item) for item in value])
        if not isinstance(value, Tensor):
            self.foreign.add(kind)
            return value
        if is_sharded(value):
            whole: Any = completed(value)
            (local,) = local_shards([whole])
            # Private: the public way would move the copy to the devices of the mesh.
            return dtensor_class()(self._buffer_for(local), whole._spec, requires_grad=False)
        if value.layout is not torch.strided:  # the compressed ones have neither strides nor foreach kernels
            return value.detach().clone().cpu()
        return self._buffer_for(value)

    def _buffer_for(self, tensor: Tensor) -> Tensor:
        # With strides, which decide in which order a later sum over the tensor is taken, and so its last bits.
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        spare = self._spare.get(key)
        buffer = spare.pop() if spare else torch.empty_like(tensor, device="cpu", requires_grad=False)
        self._used.setdefault(key, []).append(buffer)
        self._pairs.append((buffer, tensor))
        return buffer


@dataclass
class Kept:
    """Which checkpoints of a run stay: the newest ``number``, and the best."""

    number: int
    _scores: dict[Path, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, number: int) -> "Kept":
        """Take over those that lie in a folder, and remove what a crash left half done."""
        remove_leftovers(folder)
        return cls(number, {checkpoint.folder: checkpoint.score for checkpoint in intact_in(folder)})

    def removed(self) -> list[Path]:
        """Forget those that somebody removed meanwhile, and return them."""
        gone = [path for path in self._scores if not path.is_dir()]
        for path in gone:
            del self._scores[path]
        return gone

    def add(self, checkpoint: Checkpoint) -> list[Path]:
        """Take in a new one, and return those that go.

        Newer ones, which were there before a run went on from an older one, are damaged or of a newer format: they
        count for nothing, and stay.
        """
        self._scores.pop(checkpoint.folder, None)
        self._scores[checkpoint.folder] = checkpoint.score
        past = {path: score for path, score in self._scores.items() if path.name <= checkpoint.folder.name}
        newest = sorted(past, key=lambda path: path.name)[-self.number :]
        scored = {path: score for path, score in past.items() if score is not None and score == score}
        best = {min(scored, key=scored.__getitem__)} if scored else set()
        going = [path for path in past if path not in newest and path not in best]
        for path in going:
            del self._scores[path]
        return going


class CheckpointWriter:
    """Writes one checkpoint at a time into a folder."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks | None = None) -> None:
        self._folder = folder
        self._keep = keep
        self._ranks = ranks or Ranks()
        self._kept: Kept | None = None
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []
        self._spare: Path | None = None
        self.step = 0
        """The step of the last one that was begun."""

    @property
    def is_busy(self) -> bool:
        """Whether the last one is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, step: int, staged: Mapping[str, Any], manifest: Mapping[str, Any], before: Sequence[Path]) -> None:
        """Begin to write, and return; ``before`` are files that must be on the disk before."""
        folder, self.step = self._folder / checkpoint_name(step), step
        # No daemon: the interpreter waits at its end until the checkpoint is written.
        given = (folder, staged, manifest, before)
        self._thread = threading.Thread(target=self._write, args=given, name="loopscope checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait until nothing is being written, and leave nothing but checkpoints: nothing of earlier crashes either."""
        self.wait()
        self._spare = None
        if self._ranks.is_main:
            self._note_removed()
            remove_leftovers(self._folder)

    def failures(self) -> list[str]:
        """Return, once, why checkpoints could not be written or removed, and which are gone."""
        told, self._failures = self._failures, []
        return told

    def _note_removed(self) -> None:
        removed = [] if self._kept is None else self._kept.removed()
        self._failures += [f"The checkpoint {path} was removed under the run." for path in removed]

    def _write(
        self, folder: Path, staged: Mapping[str, Any], manifest: Mapping[str, Any], before: Sequence[Path]
    ) -> None:
        try:
            spare, self._spare = self._spare, None
            if self._ranks.are_many:
                from .parts import write_parts  # which takes a second to import

                written = write_parts(folder, staged, manifest, before, spare, self._ranks)
            else:
                written = write_checkpoint(folder, staged, manifest, before, spare)
        except Exception as error:
            self._failures.append(str(error))
            return
        if not self._ranks.is_main:
            return
        try:
            self._kept = self._kept or Kept.of(self._folder, self._keep)
            self._note_removed()
            for path in self._kept.add(written):
                if self._spare is not None:
                    shutil.rmtree(self._spare, ignore_errors=True)
                self._spare = set_aside(path)
        except Exception as error:  # in a thread nobody else would hear of it
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._failures.append(f"An old checkpoint in {self._folder} could not be removed: {reason}.")
