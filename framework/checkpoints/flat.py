"""What ranks hold, as tensors by name that any other ranks can use: in checkpoints of ours, in torch's, in others'."""

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
from ..state import in_bytes, is_sharded, laid_out_like, whole
from ..training import Ranks

Keys = tuple[str, ...]
"""Where in nested content something lies; as JSON the name of a tensor."""
OWN = "rank {}: {}"
"""The name of a tensor that a rank has for itself."""


class Separated(NamedTuple):
    """Nested content with tensors on the meta device in the place of tensors, and these by their paths."""

    plain: Any
    tensors: dict[str, Tensor]
    replicated: list[str]
    """The paths of tensors that ranks hold whole, though they may lie otherwise than the parameters they belong to."""

    @classmethod
    def of(cls, content: Any) -> "Separated":
        """Take out the tensors, but for single numbers and what is no array of numbers in memory."""
        tensors, replicated = dict[str, Tensor](), list[str]()

        def take(path: Keys, tensor: Tensor) -> Tensor:
            is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
            if not is_sharded(tensor) and (not is_plain or tensor.ndim == 0):
                return tensor
            tensors[json.dumps(path)] = tensor
            if is_sharded(tensor) and all(each.is_replicate() for each in tensor.placements):  # type: ignore[attr-defined]
                replicated.append(json.dumps(path))
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        return cls(replaced(content, take), tensors, replicated)

    def named(self, ranks: Ranks, purpose: str = "") -> tuple[dict[str, Tensor], list[str]]:
        """Return the tensors by names that all ranks can use, and the paths of those that this rank has for itself."""
        found = {path: _bytes(tensor) for path, tensor in self.tensors.items() if not is_sharded(tensor)}
        each = ranks.gather({path: xxhash.xxh3_128_hexdigest(data) for path, data in found.items()}, purpose)
        own = {path for path in found if any(digests.get(path) != each[0].get(path) for digests in each)}
        number = ranks.place[0]
        named = {OWN.format(number, path) if path in own else path: tensor for path, tensor in self.tensors.items()}
        return named, sorted(own)


def replaced(value: Any, replace: Callable[[Keys, Tensor], Any], path: Keys = ()) -> Any:
    """Return nested content with other tensors."""
    if isinstance(value, Tensor):
        return replace(path, value)
    if isinstance(value, Mapping):
        return {key: replaced(item, replace, (*path, str(key))) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(item, replace, (*path, str(index))) for index, item in enumerate(value))
    return value


def _bytes(tensor: Tensor) -> Any:
    return in_bytes(tensor).cpu().numpy()


def room_for(path: Keys, tensor: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor to read into, laid out as the parameter that is named in the path, if there is one."""
    if (owner := owner_of(path, tensor, parameters)) is not None:
        return torch.empty_like(owner, dtype=tensor.dtype, requires_grad=False)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def owner_of(path: Keys, tensor: Tensor, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """Return the parameter that is named in the path of a tensor of its shape, if there is one."""
    named = (parameters[name] for name in reversed(path) if name in parameters)
    return next((each for each in named if each.shape == tensor.shape), None)


PLAIN = "rank {}"
"""Under which a rank has its plain values, as bytes; what it has for itself is named with this, too."""
_ONE = PLAIN.format(0)


def flattened(content: Any, model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return nested content of each rank as tensors by name, of which ranks share those that are equal or in shards.

    All ranks call it.
    """
    separated = Separated.of(content)
    named, own = separated.named(ranks)
    file = BytesIO()
    rest = {"own": own, "ranks": ranks.arrangement(model)}
    write_tensors({**separated._asdict(), "tensors": None, **rest}, file)
    return {**named, PLAIN.format(ranks.place[0]): torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}


def gathered(flat: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return what all ranks have, on the main one with the shards put together, on the CPU; all ranks call it."""
    own = ranks.gather({name: tensor for name, tensor in flat.items() if _rank(name)})
    found = {name: tensor for name, tensor in flat.items() if not is_sharded(tensor)}
    for name in sorted(flat.keys() - found.keys()):
        tensor = whole(flat[name])
        if ranks.is_main:  # or every process of a machine would hold all of it
            found[name] = tensor.cpu()
    return {name: tensor for each in (found, *own) for name, tensor in each.items()}


def room_of(metadata: Any, key: str, model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return tensors for ``torch.distributed.checkpoint.load`` to fill with what was saved from :func:`flattened`.

    Raises :class:`UsageError` where nothing was saved under the ``key``.
    """
    saved, prefix = metadata.state_dict_metadata, f"{key}."
    found: dict[str, Any] = {name.removeprefix(prefix): saved[name] for name in saved if name.startswith(prefix)}
    there = listed(sorted({name.partition(".")[0] for name in saved}), 9)
    missing = f"This checkpoint has no state of a scope on several ranks under {key!r}"
    require(_ONE in found, f"{missing}, but {there}; key= says where it is.")
    parameters, room = dict(model.named_parameters()), dict[str, Tensor]()
    for name, entry in found.items():
        owner = _rank(name)
        if name == owner:
            room[name] = torch.zeros(entry.size, dtype=torch.uint8)
        elif owner in ("", _ONE, PLAIN.format(ranks.place[0])):
            like = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            path = json.loads(name.removeprefix(f"{owner}: "))
            room[name] = room_for(path, like, parameters)
    return room


def for_rank(state: Any, model: nn.Module, ranks: Ranks) -> Any:
    """Return nested content for this rank, of a state that is flat, or of one that is nested already.

    It is the rank's own where the ranks are those of the state, else that of the first one; what is whole and has the
    name and the shape of a parameter is laid out as this. All ranks call it; raises :class:`UsageError`, the same on
    all, where something is missing.
    """
    arrangement, parameters, held = ranks.arrangement(model), dict(model.named_parameters()), list[str]()
    if isinstance(state, Mapping) and any(_rank(name) == name for name in state):
        state, held = ranks.together(partial(_nested, state, arrangement, ranks.place[0]))

    def lay_out(path: Keys, tensor: Tensor) -> Any:
        owner: Any = tensor if is_sharded(tensor) else owner_of(path, tensor, parameters)
        if owner is None or not is_sharded(owner):
            return tensor
        found: Any = tensor if is_sharded(tensor) else laid_out_like(tensor.to(owner.device), owner)
        if json.dumps(path) not in held:
            return found
        from torch.distributed.tensor import Replicate  # which is there where DTensors are

        return found.redistribute(placements=[Replicate()] * len(found.placements))

    return replaced(state, lay_out)


def _nested(flat: Mapping[str, Tensor], arrangement: Mapping[str, Any], place: int) -> tuple[Any, list[str]]:
    """Return the plain values with the tensors in them, and the paths of those that this rank held whole."""
    number, stored = place, _plain(flat, place)
    if stored is None or stored["ranks"] != arrangement:
        number, stored = 0, _plain(flat, 0)
    if stored is None or (number != place and stored["ranks"] == arrangement):
        have = listed([name for name in flat if _rank(name) == name])
        raise UsageError(
            f"The state that was loaded is that of {have}, and this is rank {place} of {len(arrangement['indices'])}: "
            "save and load it by torch.distributed.checkpoint, or let as many ranks load each its own."
        )

    def find(path: Keys, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        name = json.dumps(path)
        name = OWN.format(number, name) if name in stored["own"] else name
        require(name in flat, f"The state that was loaded lacks {'/'.join(path)}.")
        found = flat[name]
        if is_sharded(found) or found.stride() == tensor.stride():
            return found
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(found)

    return replaced(stored["plain"], find), stored["replicated"] if stored["ranks"] == arrangement else []


def _plain(flat: Mapping[str, Tensor], number: int) -> Any:
    """Return the plain values of a rank, if they are there; executes no code from them."""
    if (data := flat.get(PLAIN.format(number))) is None:
        return None
    try:
        return read_tensors(BytesIO(data.cpu().numpy().tobytes()))
    except Exception as error:
        raise UsageError(
            f"The state of rank {number} cannot be read ({type(error).__name__}); what scope.state_dict(of=...) "
            "returns is to be filled by torch.distributed.checkpoint.load first."
        ) from error


def _rank(name: Any) -> str:
    """Return the name of the rank that has a tensor for itself, or its plain values; of what is shared an empty one."""
    return name.partition(": ")[0] if str(name).startswith("rank ") else ""
