"""The state of hooks on several ranks: as tensors by name for DCP, as whole ones, or as files; and back again."""

import json
from collections.abc import Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from ..checkpoints import STATE, open_checkpoint
from ..checkpoints.content import AFRESH
from ..checkpoints.format import load_plainly, write_checkpoint
from ..checkpoints.parts import OWN, Keys, Separated, owner_of, read_parts, replaced, room_for, write_parts
from ..errors import UsageError, listed, require
from ..state import is_sharded, laid_out_like, whole
from ..training import Ranks

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
    torch.save({"plain": separated.plain, "own": own, "ranks": ranks.arrangement(model)}, file)
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


def room_of(metadata: Metadata, key: str, model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return tensors for ``torch.distributed.checkpoint.load`` to fill with what was saved from :func:`flattened`.

    Raises :class:`UsageError` where nothing was saved under the ``key``.
    """
    saved, prefix = metadata.state_dict_metadata, f"{key}."
    found: dict[str, Any] = {name.removeprefix(prefix): saved[name] for name in saved if name.startswith(prefix)}
    there = listed(sorted({name.partition(".")[0] for name in saved}), 9)
    require(
        _ONE in found,
        f"This checkpoint has no state of a scope on several ranks under {key!r}, but {there}; key= says where it is.",
    )
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
    arrangement, parameters = ranks.arrangement(model), dict(model.named_parameters())
    if isinstance(state, Mapping) and any(_rank(name) == name for name in state):
        state = ranks.together(partial(_nested, state, arrangement, ranks.place[0]))

    def lay_out(path: Keys, tensor: Tensor) -> Tensor:
        owner = None if is_sharded(tensor) else owner_of(path, tensor, parameters)
        if owner is None or not is_sharded(owner):
            return tensor
        moved: Tensor = laid_out_like(tensor.to(owner.device), owner)
        return moved

    return replaced(state, lay_out)


def _nested(flat: Mapping[str, Tensor], arrangement: Mapping[str, Any], place: int) -> Any:
    """Put the tensors back into the plain values."""
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

    return replaced(stored["plain"], find)


def _plain(flat: Mapping[str, Tensor], number: int) -> Any:
    """Return the plain values of a rank, if they are there; executes no code from them."""
    if (data := flat.get(PLAIN.format(number))) is None:
        return None
    try:
        return torch.load(BytesIO(data.cpu().numpy().tobytes()), weights_only=True, map_location="cpu")
    except Exception as error:
        raise UsageError(
            f"The state of rank {number} cannot be read ({type(error).__name__}); what scope.state_dict(of=...) "
            "returns is to be filled by torch.distributed.checkpoint.load first."
        ) from error


def _rank(name: Any) -> str:
    """Return the name of the rank that has a tensor for itself, or its plain values; of what is shared an empty one."""
    return name.partition(": ")[0] if str(name).startswith("rank ") else ""


def write_state(folder: Path, content: Mapping[str, Any], step: int, model: nn.Module, ranks: Ranks) -> None:
    """Write the content of all ranks into a folder; all of them call it."""
    manifest: dict[str, Any] = {"step": step, "score": None}
    if ranks.are_many:
        write_parts(folder, content, manifest | {"ranks": ranks.arrangement(model)}, (), None, ranks)
    else:
        write_checkpoint(folder, content, manifest)


def read_state(folder: Path, model: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """Check what :func:`write_state` wrote, and return the content for this rank; all ranks call it.

    Raises :class:`UsageError`, the same on all ranks, for damaged files.
    """
    found = ranks.together(partial(open_checkpoint, folder))
    ranks.together(found.check)
    content = read_parts(found, model, ranks) if found.is_of_ranks else load_plainly(found.folder / STATE)
    return {name: value for name, value in content.items() if name != AFRESH}
