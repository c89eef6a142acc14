"""Checkpoints that several processes write together: each its part, planned by ``torch.distributed.checkpoint``.

Every rank writes one file in the format of single processes. It holds the rank's plain values, with a tensor without
storage (on the meta device) in the place of each tensor, and the pieces of tensors that the planner gave the rank. The
manifest says in which file which piece of a tensor lies, so that ranks of another number or layout can put their own
pieces together. Nothing of torch's own storage is used: it unpickles whatever lies in its files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, Replicate
from torch.futures import Future

from ..errors import LoopscopeError, library_warnings_ignored
from ..state import is_sharded
from ..training import Ranks
from .flat import OWN, Keys, Separated, replaced, room_for
from .format import AFRESH, RANK, Checkpoint, DamagedCheckpointError, GrowingCheckpoint, load_plainly


def write_parts(
    folder: Path, content: Any, manifest: Mapping[str, Any], before: Sequence[Path], spare: Path | None, ranks: Ranks
) -> Checkpoint:
    """Write the checkpoint of all ranks, as :func:`.format.write_checkpoint` writes that of one; all of them call it.

    Raises :class:`LoopscopeError` on all ranks where one cannot write.
    """
    separated = Separated.of(content)
    named, own = separated.named(ranks, "checkpoints")
    growing = GrowingCheckpoint(folder, spare)
    writer = _Writer(growing, {**separated._asdict(), "tensors": None, "own": own}, manifest, before)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with library_warnings_ignored():
            save(named, storage_writer=writer, planner=planner, process_group=ranks.group("checkpoints"))
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        text = str(reason) if isinstance(reason, LoopscopeError) else f"{folder}: {type(reason).__name__}: {reason}"
        raise LoopscopeError(f"{text} [rank {ranks.members[rank]}]") from reason
    finally:
        if ranks.is_main:
            growing.remove()
    return Checkpoint(folder, manifest)


class _OfOneCheckpoint:
    """What torch asks of any storage: each is made for one checkpoint, and keeps plans as they are."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # none is found by a path

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans


@dataclass(eq=False)
class _Writer(_OfOneCheckpoint, StorageWriter):
    """Writes this rank's file, and on the first rank, once all have, the manifest, by which the checkpoint counts."""

    growing: GrowingCheckpoint
    content: Mapping[str, Any]
    manifest: Mapping[str, Any]
    before: Sequence[Path]
    name: str = ""

    def set_up_storage_writer(self, is_coordinator: bool, *, rank: int = 0, **kwargs: Any) -> None:
        """Take this rank's number."""
        self.name = RANK.format(rank)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Make the folder into which all ranks write next."""
        self.growing.begin()
        return plans

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        """Write this rank's file, and return where its pieces lie, and last its size and digest."""
        pieces = {str(place): planner.resolve_data(item).detach() for place, item in enumerate(plan.items)}
        summary = self.growing.write(self.name, {**self.content, "pieces": pieces})
        results = [WriteResult(item.index, 0, [self.name, str(place)]) for place, item in enumerate(plan.items)]
        done: Future[Any] = Future()
        done.set_result([*results, WriteResult(MetadataIndex(""), 0, [self.name, summary])])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the manifest and give the checkpoint its name."""
        files = dict(last.storage_data for *_, last in results)
        lies = {item.index: item.storage_data for found in results for item in found[:-1]}
        tensors: dict[str, Any] = {}
        each: Mapping[str, Any] = metadata.state_dict_metadata
        for name, found in each.items():
            places = [(piece, lies[MetadataIndex(name, piece.offsets)]) for piece in found.chunks]
            pieces = [[[*piece.offsets], [*piece.sizes], *place] for piece, place in places]
            dtype = str(found.properties.dtype).removeprefix("torch.")
            tensors[name] = {"shape": [*found.size], "dtype": dtype, "pieces": pieces}
        self.growing.complete({**self.manifest, "tensors": tensors}, files, self.before)


class _Reader(_OfOneCheckpoint, StorageReader):
    """Reads the pieces of a checkpoint, from whichever rank's file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder, self._tensors = checkpoint.folder, checkpoint.manifest["tensors"]
        self._lies: dict[MetadataIndex, Sequence[str]] = {}
        self._files: dict[str, Any] = {}

    def read_metadata(self) -> Metadata:
        """Return what the manifest says of the tensors."""
        found: dict[str, Any] = {}
        for name, entry in self._tensors.items():
            pieces = [ChunkStorageMetadata(torch.Size(piece[0]), torch.Size(piece[1])) for piece in entry["pieces"]]
            properties = TensorProperties(getattr(torch, entry["dtype"]))
            found[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), pieces)
            for (_, _, *lies), piece in zip(entry["pieces"], pieces, strict=True):
                self._lies[MetadataIndex(name, piece.offsets)] = lies
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: everything is known."""

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Copy the pieces into the tensors that are there for them."""
        for item in plan.items:
            file, number = self._lies[item.storage_index]
            stored = self.file(file)["pieces"][number]
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def file(self, name: str) -> Any:
        """Return what a rank has written, its tensors mapped into memory."""
        if name not in self._files:
            self._files[name] = load_plainly(self.folder / name, mapped=True)
        return self._files[name]


def read_parts(checkpoint: Checkpoint, model: nn.Module | None = None, ranks: Ranks | None = None) -> dict[str, Any]:
    """Return what this rank goes on with: its own content where ranks and layout are those that wrote it.

    Otherwise it is the first rank's, with each tensor that a mapping has under the name of a parameter, in its shape,
    laid out as that parameter is now, and with the random streams of the rank that had the same rows, if there was one.
    Without a ``model`` tensors are whole, and what other ranks have of their own comes beside.
    Files must have been checked; no code in them is executed.
    """
    reader, manifest = _Reader(checkpoint), checkpoint.manifest
    parameters = {} if model is None else dict(model.named_parameters())
    number, streams, same = 0, 0, False
    if model is not None and ranks is not None:
        same, indices = ranks.arrangement(model) == manifest["ranks"], manifest["ranks"]["indices"]
        number = ranks.place[0] if same else 0
        streams = indices.index(ranks.index) if ranks.index in indices else 0
    content: dict[str, Any] = _filled(reader, number, parameters, same=same)
    for other in range(1, len(manifest["ranks"]["indices"])) if model is None and "state" in content else ():
        kept = _filled(reader, other, {}, only=lambda path, own: own and path[0] == "state").get("state", {})
        content["state"] = {**content["state"], f"rank {other}": kept}
    if ranks is not None and ranks.index not in manifest["ranks"]["indices"]:
        content[AFRESH] = True
    if streams != number:
        other = _filled(reader, streams, parameters, only=lambda path, own: "generators" in path)
        for name in ("state", "pre_epoch"):
            if isinstance(content.get(name), dict) and isinstance(other.get(name), dict):
                content[name]["generators"] = other[name]["generators"]
    return content


def _filled(
    reader: _Reader,
    number: int,
    parameters: Mapping[str, Tensor],
    only: Callable[[Keys, bool], bool] = lambda path, own: True,
    same: bool = False,
) -> Any:
    """Return a rank's content with its tensors read: ``only`` some, by path and by whether they are its own.

    They lie as parameters do, where ranks are the ``same`` as they lay.
    """
    file = RANK.format(number)
    stored, targets = reader.file(file), dict[str, Tensor]()

    def room(path: Keys, tensor: Tensor) -> Any:
        if not tensor.is_meta:
            return tensor.clone()  # the file it is mapped from may be written over
        name, own = json.dumps(path), json.dumps(path) in stored["own"]
        if not only(path, own):
            return None
        name = OWN.format(number, name) if own else name
        targets[name] = room_for(path, tensor, parameters)
        if same and json.dumps(path) in stored["replicated"] and is_sharded(targets[name]):
            targets[name] = _held_whole(targets[name])
        return targets[name]

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        content = replaced(stored["plain"], room)
        with library_warnings_ignored():  # DCP warns that no process group is used, which is intended
            load(targets, storage_reader=reader, planner=planner, no_dist=True)
    except (CheckpointException, LookupError, TypeError, AttributeError, ValueError) as error:
        reason = error.failures[0][0] if isinstance(error, CheckpointException) else error
        if isinstance(reason, DamagedCheckpointError):
            raise reason from None
        raise DamagedCheckpointError(f"{reader.folder / file} cannot be loaded: {type(reason).__name__}.") from error
    return content


def _held_whole(tensor: Any) -> Any:
    """Return a new tensor like a DTensor that each rank holds whole."""
    replicate = [Replicate()] * len(tensor.placements)
    local = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    return DTensor.from_local(local, tensor.device_mesh, replicate, run_check=False)
