"""A digest of every entry of the training state, equal on every rank, and the chain of these digests."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..state import TrainingState, described, without_on_demand
from ..tensors import byte_tensors, completed, groups_of, inner_tensors, is_cut_off, is_sharded, over_shards
from .tensor_sums import ALGORITHM, sums


def state_digests(state: TrainingState) -> dict[str, str]:
    """Return a 128-bit digest, in hexadecimal digits, of each entry of the state by its name.

    Entries that the loop keeps only for hooks are omitted. If parameters are sharded, all ranks must call this
    together: a sharded entry has the digest of the full tensor on every rank. Other entries belong to their rank, and
    some differ between ranks, such as the batch.
    """
    return digests(without_on_demand(dict(state.leaf_values())))


@torch.no_grad()
def digests(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each tensor or plain value by its name; it includes name, dtype and shape."""
    pieces = [(name, text, tensor) for name, leaf in leaves.items() for text, tensor in _pieces(leaf)]
    numbers = iter(_sums([tensor for *_, tensor in pieces if tensor is not None]))
    # digest = xxh3_128(algorithm, name, then for every piece: text, [S[0], S[1]])
    summaries: dict[str, xxhash.xxh3_128] = {}
    for name, text, tensor in pieces:
        summary = summaries.setdefault(name, xxhash.xxh3_128(f"{ALGORITHM}\0{name}".encode()))
        summary.update(f"\0{text}\0{'' if tensor is None else next(numbers)}".encode())
    return {name: summary.hexdigest() for name, summary in summaries.items()}


def link(previous: str, step: int, entries: Mapping[str, str]) -> str:
    """Return the next link of a chain of digests (32 hexadecimal digits); ``previous`` is empty for the first link."""
    # link[n] = xxh3_128(algorithm, link[n - 1], step, entries sorted by name)
    lines = [f"{ALGORITHM}\0{previous}\0{step}", *[f"{name}\0{value}" for name, value in sorted(entries.items())]]
    return xxhash.xxh3_128_hexdigest("\0".join(lines).encode())


def _pieces(leaf: Any) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the pieces of an entry: texts, most of them with the tensor that they describe."""
    if not isinstance(leaf, Tensor):
        yield described(leaf), None
        return
    if is_sharded(leaf):
        yield _text(leaf), completed(leaf)
        return
    inner = inner_tensors(leaf)
    if inner or leaf.layout is not torch.strided:
        yield f"{_text(leaf)} {leaf.layout} of {len(inner)}", None
    for part in byte_tensors(leaf.detach()):
        has_bytes = not part.is_meta and not is_cut_off(part)
        yield (_text(part), part) if has_bytes else (f"{_text(part)} without memory", None)
    for part in inner:
        yield from _pieces(part)


def _text(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _sums(tensors: list[Tensor]) -> list[list[int]]:
    """Return both sums of each tensor; those of DTensors are added over the ranks with shards."""
    if not tensors:
        return []
    all_sums = [_sums_of_shard(tensor) if is_sharded(tensor) else sums(tensor) for tensor in tensors]
    device = next((item.device for item in all_sums if item.device.type != "cpu"), all_sums[0].device)
    # shape (2, tensors), so that the sums of all shards need one all-reduce per process group
    table = torch.stack([item.to(device) for item in all_sums], 1)
    return over_shards(table, groups_of(tensors)).t().tolist()  # type: ignore[no-any-return]


def _sums_of_shard(tensor: Any) -> Tensor:
    # The private protocol by which torch.distributed.checkpoint gets the offsets of a DTensor's shard.
    (place,) = tensor.__create_chunk_list__()
    return sums(tensor.to_local(), [*place.offsets], tensor.shape)
