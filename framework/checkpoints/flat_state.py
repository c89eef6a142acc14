"""Flat form of the state of ranks: named tensors that any number of ranks can load from a checkpoint."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from ..durable_files import read_tensors, write_tensors
from ..errors import UsageError, listed, require
from ..state.values import STORED_DICTS, dict_like
from ..tensors import in_bytes, is_sharded, laid_out_like, unsharded
from ..training import Ranks

Keys = tuple[str, ...]
"""Path of keys to a value in nested content; as JSON the name of a tensor."""
RANK_TENSOR = "rank {}: {}"
"""Name of a tensor that differs between ranks, from the rank's number and the tensor's path."""


class Separated(NamedTuple):
    """Nested content with a placeholder on the meta device for each tensor, and the tensors by their paths."""

    plain: Any
    tensors: dict[str, Tensor]
    replicated: list[str]
    """Paths of DTensors that are replicated on every rank, even if their parameters are sharded."""

    @classmethod
    def of(cls, content: Any) -> "Separated":
        """Separate tensors from plain values; scalars, tensor subclasses and non-strided layouts stay in place."""
        tensors, replicated = dict[str, Tensor](), list[str]()

        def take(path: Keys, tensor: Tensor) -> Tensor:
            is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
            if not is_sharded(tensor) and (not is_plain or tensor.ndim == 0):
                return tensor
            tensors[json.dumps(path)] = tensor
            if is_sharded(tensor) and all(item.is_replicate() for item in tensor.placements):  # type: ignore[attr-defined]
                replicated.append(json.dumps(path))
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        return cls(map_tensors(content, take), tensors, replicated)

    def named(self, ranks: Ranks, purpose: str = "") -> tuple[dict[str, Tensor], list[str]]:
        """Return the tensors by names unique across ranks, and the paths of those that differ between ranks."""
        arrays = {path: _bytes(tensor) for path, tensor in self.tensors.items() if not is_sharded(tensor)}
        by_rank = ranks.gather({path: xxhash.xxh3_128_hexdigest(data) for path, data in arrays.items()}, purpose)
        rank_paths = {path for path in arrays if any(digests.get(path) != by_rank[0].get(path) for digests in by_rank)}
        number = ranks.rank_and_count[0]
        named = {
            RANK_TENSOR.format(number, path) if path in rank_paths else path: tensor
            for path, tensor in self.tensors.items()
        }
        return named, sorted(rank_paths)


def map_tensors(value: Any, replace: Callable[[Keys, Tensor], Any], path: Keys = ()) -> Any:
    """Return nested content with ``replace(path, tensor)`` in place of each tensor."""
    if isinstance(value, Tensor):
        return replace(path, value)
    if type(value) in STORED_DICTS:
        return dict_like(value, [map_tensors(item, replace, (*path, str(key))) for key, item in value.items()])
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, replace, (*path, str(index))) for index, item in enumerate(value))
    return value


def _bytes(tensor: Tensor) -> Any:
    return in_bytes(tensor).cpu().numpy()


def allocate_for(path: Keys, tensor: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Allocate a tensor to read into, laid out like the parameter that its path names, if any."""
    if (owner := matching_parameter(path, tensor, parameters)) is not None:
        return torch.empty_like(owner, dtype=tensor.dtype, requires_grad=False)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def matching_parameter(path: Keys, tensor: Tensor, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """Return the parameter that a tensor's path names, if it has the same shape; else ``None``."""
    candidates = (parameters[name] for name in reversed(path) if name in parameters)
    return next((parameter for parameter in candidates if parameter.shape == tensor.shape), None)


RANK_VALUES = "rank {}"
"""Name of a rank's plain values, as bytes. It also starts the names of the tensors that differ between ranks."""
_FIRST_RANK = RANK_VALUES.format(0)


def flatten_state(content: Any, model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return the nested content of each rank as named tensors; equal and sharded tensors have one name on all ranks.

    This is a collective call.
    """
    separated = Separated.of(content)
    named, rank_paths = separated.named(ranks)
    file = BytesIO()
    layout = {"own": rank_paths, "ranks": ranks.arrangement(model)}
    write_tensors({**separated._asdict(), "tensors": None, **layout}, file)
    # A bytearray, since torch.frombuffer warns about memory that is read-only, such as bytes.
    values = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return {**named, RANK_VALUES.format(ranks.rank_and_count[0]): values}


def gather_tensors(flat: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return the tensors of all ranks; on the main rank complete and on the CPU. This is a collective call."""
    by_rank = ranks.gather({name: tensor for name, tensor in flat.items() if _rank(name)})
    complete = {name: tensor for name, tensor in flat.items() if not is_sharded(tensor)}
    for name in sorted(flat.keys() - complete.keys()):
        tensor = unsharded(flat[name])
        if ranks.is_main:  # other ranks drop it: a machine's memory would otherwise hold one copy per process
            complete[name] = tensor.cpu()
    return {name: tensor for tensors in (complete, *by_rank) for name, tensor in tensors.items()}


def allocate_saved(metadata: Any, key: str, model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Allocate the tensors that ``torch.distributed.checkpoint.load`` fills with a result of :func:`flatten_state`.

    Raises:
        UsageError: if nothing was saved under ``key``.
    """
    saved, prefix = metadata.state_dict_metadata, f"{key}."
    entries: dict[str, Any] = {name.removeprefix(prefix): saved[name] for name in saved if name.startswith(prefix)}
    present_keys = listed(sorted({name.partition(".")[0] for name in saved}), 9)
    missing = f"This checkpoint has no state of a scope on several ranks under the key {key!r}"
    require(
        _FIRST_RANK in entries, f"{missing}; its keys are {present_keys}. Pass the key of the scope's state as key=."
    )
    parameters, targets = dict(model.named_parameters()), dict[str, Tensor]()
    for name, entry in entries.items():
        owner = _rank(name)
        if name == owner:
            targets[name] = torch.zeros(entry.size, dtype=torch.uint8)
        elif owner in ("", _FIRST_RANK, RANK_VALUES.format(ranks.rank_and_count[0])):
            like = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            path = json.loads(name.removeprefix(f"{owner}: "))
            targets[name] = allocate_for(path, like, parameters)
    return targets


def state_for_rank(state: Any, model: nn.Module, ranks: Ranks) -> Any:
    """Return the nested content for this rank from a flat or nested state. This is a collective call.

    With the ranks that saved the state, each gets its own content; otherwise all get that of the first rank. A
    complete tensor with the name and shape of a parameter is laid out like that parameter.

    Raises:
        UsageError: on all ranks, if the state is incomplete.
    """
    arrangement, parameters, replicated = ranks.arrangement(model), dict(model.named_parameters()), list[str]()
    if isinstance(state, Mapping) and any(_rank(name) == name for name in state):
        state, replicated = ranks.call_on_all(partial(_nested, state, arrangement, ranks.rank_and_count[0]))

    def lay_out(path: Keys, tensor: Tensor) -> Any:
        owner: Any = tensor if is_sharded(tensor) else matching_parameter(path, tensor, parameters)
        if owner is None or not is_sharded(owner):
            return tensor
        sharded: Any = tensor if is_sharded(tensor) else laid_out_like(tensor.to(owner.device), owner)
        if json.dumps(path) not in replicated:
            return sharded
        from torch.distributed.tensor import Replicate  # imported by now, as the tensor is a DTensor

        return sharded.redistribute(placements=[Replicate()] * len(sharded.placements))

    return map_tensors(state, lay_out)


def _nested(flat: Mapping[str, Tensor], arrangement: Mapping[str, Any], own_rank: int) -> tuple[Any, list[str]]:
    """Return the nested content with its tensors, and the paths of the tensors that were replicated on this rank."""
    number, stored = own_rank, _plain(flat, own_rank)
    if stored is None or stored["ranks"] != arrangement:
        number, stored = 0, _plain(flat, 0)
    if stored is None or (number != own_rank and stored["ranks"] == arrangement):
        stored_ranks = listed([name for name in flat if _rank(name) == name])
        raise UsageError(
            f"The loaded state belongs to {stored_ranks}, but this is rank {own_rank} of "
            f"{len(arrangement['indices'])}. Save and load it with torch.distributed.checkpoint, or load it on "
            "as many ranks as saved it, each its own."
        )

    def find(path: Keys, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        name = json.dumps(path)
        name = RANK_TENSOR.format(number, name) if name in stored["own"] else name
        require(name in flat, f"The loaded state lacks {'/'.join(path)}.")
        loaded = flat[name]
        if is_sharded(loaded) or loaded.stride() == tensor.stride():
            return loaded
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(loaded)

    return map_tensors(stored["plain"], find), stored["replicated"] if stored["ranks"] == arrangement else []


def _plain(flat: Mapping[str, Tensor], number: int) -> Any:
    """Return the plain values of a rank, or ``None`` if they are missing; executes no code from them."""
    if (data := flat.get(RANK_VALUES.format(number))) is None:
        return None
    try:
        return read_tensors(BytesIO(data.cpu().numpy().tobytes()))
    except Exception as error:
        raise UsageError(
            f"The state of rank {number} cannot be read ({type(error).__name__}); first fill the result of "
            "scope.state_dict(of=...) with torch.distributed.checkpoint.load."
        ) from error


def _rank(name: Any) -> str:
    """Return the rank's name in the name of its plain values or of a tensor that differs; empty for a shared tensor."""
    return name.partition(": ")[0] if str(name).startswith("rank ") else ""
