"""Checkpoints that several processes write together: each its part, planned by ``torch.distributed.checkpoint``.

Every rank writes one file in the format of single processes. It holds the rank's plain values, with a tensor without
storage (on the meta device) in the place of each tensor, and the pieces of tensors that the planner gave the rank. The
manifest says in which file which piece of a tensor lies, so that ranks of another number or layout can put their own
pieces together. Nothing of torch's own storage is used: it unpickles whatever lies in its files.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from ..errors import LoopscopeError
from ..state import is_sharded
from ..training import Ranks
from .content import AFRESH
from .format import RANK, Checkpoint, DamagedCheckpointError, GrowingCheckpoint, load_plainly

Keys = tuple[str, ...]
"""Where in nested content something lies; as JSON the name of a tensor."""
OWN = "rank {}: {}"
"""The name of a tensor that a rank has for itself."""


class Separated(NamedTuple):
    """Nested content with tensors on the meta device in the place of tensors, and these by their paths."""

    plain: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, content: Any) -> "Separated":
        """Take out the tensors, but for single numbers and what is no array of numbers in memory."""
        tensors: dict[str, Tensor] = {}

        def take(path: Keys, tensor: Tensor) -> Tensor:
            is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
            if not is_sharded(tensor) and (not is_plain or tensor.ndim == 0):
                return tensor
            tensors[json.dumps(path)] = tensor
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        return cls(replaced(content, take), tensors)

    def named(self, ranks: Ranks, purpose: str = "") -> tuple[dict[str, Tensor], list[str]]:
        """Return the tensors by names that all ranks can use, and the paths of those that this rank has for itself."""
        found = {path: _bytes(tensor) for path, tensor in self.tensors.items() if not is_sharded(tensor)}
        each = ranks.gather({path: xxhash.xxh3_128_hexdigest(data) for path, data in found.items()}, purpose)
        own = {path for path in found if any(digests.get(path) != each[0].get(path) for digests in each)}
        number = ranks.place[0]
        named = {OWN.format(number, path) if path in own else path: tensor for path, tensor in self.tensors.items()}
        return named, sorted(own)


def replaced(value: Any, replace: Callable[[Keys, Tensor], Tensor], path: Keys = ()) -> Any:
    """Return nested content with other tensors."""
    if isinstance(value, Tensor):
        return replace(path, value)
    if isinstance(value, Mapping):
        return {key: replaced(item, replace, (*path, str(key))) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(item, replace, (*path, str(index))) for index, item in enumerate(value))
    return value


def write_parts(
    folder: Path, content: Any, manifest: Mapping[str, Any], before: Sequence[Path], spare: Path | None, ranks: Ranks
) -> Checkpoint:
    """Write the checkpoint of all ranks, as :func:`.format.write_checkpoint` writes that of one; all of them call it.

    Raises :class:`LoopscopeError` on all ranks where one cannot write.
    """
    separated = Separated.of(content)
    named, own = separated.named(ranks, "checkpoints")
    growing = GrowingCheckpoint(folder, spare)
    writer = _Writer(growing, {"plain": separated.plain, "own": own}, manifest, before)
    try:
        distributed_checkpoint.save(
            named,
            storage_writer=writer,
            planner=distributed_checkpoint.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=ranks.group("checkpoints"),
        )
    except distributed_checkpoint.api.CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        text = str(reason) if isinstance(reason, LoopscopeError) else f"{folder}: {type(reason).__name__}: {reason}"
        raise LoopscopeError(f"{text} [rank {ranks.members[rank]}]") from reason
    finally:
        if ranks.is_main:
            growing.remove()
    return Checkpoint(folder, manifest)


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


class _Writer(distributed_checkpoint.StorageWriter):
    """Writes this rank's file, and on the first rank, once all have, the manifest, by which the checkpoint counts."""

    def __init__(
        self,
        growing: GrowingCheckpoint,
        content: Mapping[str, Any],
        manifest: Mapping[str, Any],
        before: Sequence[Path],
    ) -> None:
        self._growing, self._content, self._manifest, self._before = growing, content, manifest, before
        self._name = ""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer is made for each checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return whether the writer is found by a path: it is not."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *, rank: int = 0, **kwargs: Any) -> None:
        """Take this rank's number."""
        self._name = RANK.format(rank)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Make the folder into which all ranks write next."""
        self._growing.begin()
        return plans

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        """Write this rank's file, and return where its pieces lie, and last its size and digest."""
        pieces = {str(place): planner.resolve_data(item).detach() for place, item in enumerate(plan.items)}
        summary = self._growing.write(self._name, {**self._content, "pieces": pieces})
        results = [
            distributed_checkpoint.storage.WriteResult(item.index, 0, [self._name, str(place)])
            for place, item in enumerate(plan.items)
        ]
        done: Future[Any] = Future()
        done.set_result([*results, distributed_checkpoint.storage.WriteResult(None, 0, [self._name, summary])])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the manifest and give the checkpoint its name."""
        files = dict(last.storage_data for *_, last in results)
        lies = {item.index: item.storage_data for found in results for item in found[:-1]}
        tensors = {
            name: {
                "shape": [*found.size],
                "dtype": str(found.properties.dtype).removeprefix("torch."),
                "pieces": [
                    [[*piece.offsets], [*piece.sizes], *lies[MetadataIndex(name, piece.offsets)]]
                    for piece in found.chunks
                ],
            }
            for name, found in metadata.state_dict_metadata.items()
        }
        self._growing.complete({**self._manifest, "tensors": tensors}, files, self._before)


class _Reader(distributed_checkpoint.StorageReader):
    """Reads the pieces of a checkpoint, from whichever rank's file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder, self._tensors = checkpoint.folder, checkpoint.manifest["tensors"]
        self._lies: dict[MetadataIndex, Sequence[str]] = {}
        self._files: dict[str, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a reader is made for each checkpoint."""

    def read_metadata(self) -> Metadata:
        """Return what the manifest says of the tensors."""
        found: dict[str, Any] = {}
        for name, entry in self._tensors.items():
            pieces = [ChunkStorageMetadata(torch.Size(piece[0]), torch.Size(piece[1])) for piece in entry["pieces"]]
            found[name] = TensorStorageMetadata(
                TensorProperties(getattr(torch, entry["dtype"])), torch.Size(entry["shape"]), pieces
            )
            for (_, _, *lies), piece in zip(entry["pieces"], pieces, strict=True):
                self._lies[MetadataIndex(name, piece.offsets)] = lies
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: everything is known."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return whether the reader is found by a path: it is not."""
        return False

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
    laid out as that parameter is now; without a ``model`` it is whole. Random streams are then those of the rank that
    had the same rows, if there was one. Files must have been checked; no code in them is executed.
    """
    reader, manifest = _Reader(checkpoint), checkpoint.manifest
    parameters = {} if model is None else dict(model.named_parameters())
    number, streams = 0, 0
    if model is not None and ranks is not None:
        same, indices = ranks.arrangement(model) == manifest["ranks"], manifest["ranks"]["indices"]
        number = ranks.place[0] if same else 0
        streams = indices.index(ranks.index) if ranks.index in indices else 0
    content = _filled(reader, number, parameters)
    if ranks is not None and ranks.index not in manifest["ranks"]["indices"]:
        content[AFRESH] = True
    if streams != number:
        other = _filled(reader, streams, parameters, only=lambda path: "generators" in path)
        for name in ("state", "pre_epoch"):
            if isinstance(content.get(name), dict) and isinstance(other.get(name), dict):
                content[name]["generators"] = other[name]["generators"]
    return content


def _filled(
    reader: _Reader, number: int, parameters: Mapping[str, Tensor], only: Callable[[Keys], bool] = lambda path: True
) -> Any:
    """Return a rank's content with its tensors read."""
    file = RANK.format(number)
    stored, targets = reader.file(file), dict[str, Tensor]()

    def room(path: Keys, tensor: Tensor) -> Tensor:
        if not tensor.is_meta or not only(path):
            return tensor.clone()  # the file it is mapped from may be written over
        name = json.dumps(path)
        name = OWN.format(number, name) if name in stored["own"] else name
        targets[name] = room_for(path, tensor, parameters)
        return targets[name]

    try:
        content = replaced(stored["plain"], room)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that nothing goes between ranks, as is meant
            distributed_checkpoint.load(
                targets,
                storage_reader=reader,
                planner=distributed_checkpoint.DefaultLoadPlanner(
                    flatten_state_dict=False, flatten_sharded_tensors=False
                ),
                no_dist=True,
            )
    except (
        distributed_checkpoint.api.CheckpointException,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
    ) as error:
        raise DamagedCheckpointError(f"{reader.folder / file} cannot be loaded: {type(error).__name__}.") from error
    return content


def room_for(path: Keys, tensor: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor to read into, laid out as the parameter that is named in the path, if there is one."""
    if (owner := owner_of(path, tensor, parameters)) is not None:
        return torch.empty_like(owner, dtype=tensor.dtype, requires_grad=False)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def owner_of(path: Keys, tensor: Tensor, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """Return the parameter that is named in the path of a tensor of its shape, if there is one."""
    named = (parameters[name] for name in reversed(path) if name in parameters)
    return next((each for each in named if each.shape == tensor.shape), None)
