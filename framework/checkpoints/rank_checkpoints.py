"""Checkpoints that several processes write together, one file each, planned by ``torch.distributed.checkpoint``.

Every rank writes one file in the format of a single process. The file contains the rank's plain values, with a
placeholder on the meta device for each tensor, and the tensor pieces that the planner assigned to this rank. The
manifest maps each piece to its file, so that another number or layout of ranks can assemble its own pieces. The storage
classes of torch are not used, since they unpickle arbitrary objects from their files.
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
from ..tensors import is_sharded
from ..training import Ranks
from .flat_state import RANK_TENSOR, Keys, Separated, allocate_for, map_tensors
from .format import FRESH_STREAMS, RANK_FILE, Checkpoint, DamagedCheckpointError, PartialCheckpoint, load_plainly


def write_parts(
    folder: Path,
    content: Any,
    manifest: Mapping[str, Any],
    sync_first: Sequence[Path],
    spare: Path | None,
    ranks: Ranks,
) -> Checkpoint:
    """Write one checkpoint of all ranks, as :func:`.format.write_checkpoint` does for one. This is a collective call.

    Raises:
        LoopscopeError: on all ranks, if one of them cannot write.
    """
    separated = Separated.of(content)
    named, rank_paths = separated.named(ranks, "checkpoints")
    partial = PartialCheckpoint(folder, spare)
    writer = _Writer(partial, {**separated._asdict(), "tensors": None, "own": rank_paths}, manifest, sync_first)
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
            partial.remove()
    return Checkpoint(folder, manifest)


class _SingleCheckpointStorage:
    """Methods that torch requires of any storage; this one serves one checkpoint and leaves plans unchanged."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # torch must not choose this class for a path

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans


@dataclass(eq=False)
class _Writer(_SingleCheckpointStorage, StorageWriter):
    """Writes this rank's file; the first rank then writes the manifest, which makes the checkpoint valid."""

    partial: PartialCheckpoint
    content: Mapping[str, Any]
    manifest: Mapping[str, Any]
    sync_first: Sequence[Path]
    name: str = ""

    def set_up_storage_writer(self, is_coordinator: bool, *, rank: int = 0, **kwargs: Any) -> None:
        """Name the file of this rank after its number."""
        self.name = RANK_FILE.format(rank)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Create the folder that all ranks write into."""
        self.partial.create_folder()
        return plans

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        """Write this rank's file, and return the locations of its pieces, followed by its size and digest."""
        pieces = {str(position): planner.resolve_data(item).detach() for position, item in enumerate(plan.items)}
        summary = self.partial.write(self.name, {**self.content, "pieces": pieces})
        results = [WriteResult(item.index, 0, [self.name, str(position)]) for position, item in enumerate(plan.items)]
        done: Future[Any] = Future()
        done.set_result([*results, WriteResult(MetadataIndex(""), 0, [self.name, summary])])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the manifest, then rename the folder to the checkpoint's final name."""
        files = dict(last.storage_data for *_, last in results)
        locations = {item.index: item.storage_data for of_rank in results for item in of_rank[:-1]}
        tensors: dict[str, Any] = {}
        entries: Mapping[str, Any] = metadata.state_dict_metadata
        for name, entry in entries.items():
            located = [(piece, locations[MetadataIndex(name, piece.offsets)]) for piece in entry.chunks]
            pieces = [[[*piece.offsets], [*piece.sizes], *location] for piece, location in located]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"shape": [*entry.size], "dtype": dtype, "pieces": pieces}
        self.partial.complete({**self.manifest, "tensors": tensors}, files, self.sync_first)


class _Reader(_SingleCheckpointStorage, StorageReader):
    """Reads the tensor pieces of a checkpoint from the files of all ranks."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder, self._tensors = checkpoint.folder, checkpoint.manifest["tensors"]
        self._locations: dict[MetadataIndex, Sequence[str]] = {}
        self._files: dict[str, Any] = {}

    def read_metadata(self) -> Metadata:
        """Return the metadata of the tensors from the manifest."""
        entries: dict[str, Any] = {}
        for name, entry in self._tensors.items():
            pieces = [ChunkStorageMetadata(torch.Size(piece[0]), torch.Size(piece[1])) for piece in entry["pieces"]]
            properties = TensorProperties(getattr(torch, entry["dtype"]))
            entries[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), pieces)
            for (_, _, *location), piece in zip(entry["pieces"], pieces, strict=True):
                self._locations[MetadataIndex(name, piece.offsets)] = location
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: the manifest has all metadata."""

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Copy the planned pieces into their target tensors."""
        for item in plan.items:
            file, number = self._locations[item.storage_index]
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
        """Return the content of a rank's file, its tensors mapped into memory."""
        if name not in self._files:
            self._files[name] = load_plainly(self.folder / name, mapped=True)
        return self._files[name]


def read_parts(checkpoint: Checkpoint, model: nn.Module | None = None, ranks: Ranks | None = None) -> dict[str, Any]:
    """Return the content from which this rank resumes; executes no code from the files, which must have been checked.

    If number and layout of the ranks are those that wrote the checkpoint, it is the rank's own content. Otherwise it is
    the first rank's: each tensor with the name and shape of a parameter is laid out like that parameter now, and the
    random streams are those of the rank that had the same rows, if any. Without a ``model`` tensors are complete, and
    ``state`` also has the entries in which other ranks differ, under ``rank N``.
    """
    reader, manifest = _Reader(checkpoint), checkpoint.manifest
    parameters = {} if model is None else dict(model.named_parameters())
    number, streams, same = 0, 0, False
    if model is not None and ranks is not None:
        same, indices = ranks.arrangement(model) == manifest["ranks"], manifest["ranks"]["indices"]
        number = ranks.rank_and_count[0] if same else 0
        streams = indices.index(ranks.index) if ranks.index in indices else 0
    content: dict[str, Any] = _read_rank(reader, number, parameters, same=same)
    for other in range(1, len(manifest["ranks"]["indices"])) if model is None and "state" in content else ():
        differing = _read_rank(reader, other, {}, only=_is_own_state)
        content["state"] = {**content["state"], f"rank {other}": differing.get("state", {})}
    if ranks is not None and ranks.index not in manifest["ranks"]["indices"]:
        content[FRESH_STREAMS] = True
    if streams != number:
        other = _read_rank(reader, streams, parameters, only=_is_of_generators)
        for name in ("state", "pre_epoch"):
            if isinstance(content.get(name), dict) and isinstance(other.get(name), dict):
                content[name]["generators"] = other[name]["generators"]
    return content


def _is_own_state(path: Keys, is_own: bool) -> bool:
    return is_own and path[0] == "state"


def _is_of_generators(path: Keys, is_own: bool) -> bool:
    return "generators" in path


def _read_rank(
    reader: _Reader,
    number: int,
    parameters: Mapping[str, Tensor],
    only: Callable[[Keys, bool], bool] | None = None,
    same: bool = False,
) -> Any:
    """Read the content that a rank wrote, its tensors laid out like the parameters that they belong to.

    ``only`` selects tensors by path and by whether they differ between ranks; the others become ``None``. With the
    ``same`` ranks as at saving, tensors that were replicated are replicated again.
    """
    file = RANK_FILE.format(number)
    stored, targets = reader.file(file), dict[str, Tensor]()

    def allocate(path: Keys, tensor: Tensor) -> Any:
        if not tensor.is_meta:
            return tensor.clone()  # the file it is mapped from may be overwritten
        name, is_own = json.dumps(path), json.dumps(path) in stored["own"]
        if only is not None and not only(path, is_own):
            return None
        name = RANK_TENSOR.format(number, name) if is_own else name
        targets[name] = allocate_for(path, tensor, parameters)
        if same and json.dumps(path) in stored["replicated"] and is_sharded(targets[name]):
            targets[name] = _replicated_like(targets[name])
        return targets[name]

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        content = map_tensors(stored["plain"], allocate)
        with library_warnings_ignored():  # DCP warns that it uses no process group, which is intended
            load(targets, storage_reader=reader, planner=planner, no_dist=True)
    except (CheckpointException, LookupError, TypeError, AttributeError, ValueError) as error:
        reason = error.failures[0][0] if isinstance(error, CheckpointException) else error
        if isinstance(reason, DamagedCheckpointError):
            raise reason from None
        raise DamagedCheckpointError(f"{reader.folder / file} cannot be loaded: {type(reason).__name__}.") from error
    return content


def _replicated_like(tensor: Any) -> Any:
    """Return a new DTensor of the same shape and mesh that is replicated on every rank."""
    replicate = [Replicate()] * len(tensor.placements)
    local = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    return DTensor.from_local(local, tensor.device_mesh, replicate, run_check=False)
