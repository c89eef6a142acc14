"""Sequences of tokens: arrays in memory or files mapped into it, and batches as a function of (seed, step)."""

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from loopscope.data import Loader, SourceOfRows, derived_seed
from loopscope.errors import UsageError, require
from torch import Tensor

RAW = {".u16": np.uint16, ".u32": np.uint32, ".bin": np.uint16}
"""Raw files by suffix; ``.bin`` is the layout of nanoGPT."""
TOKEN_FILES = (".npy", *RAW)


def open_tokens(path: Path) -> np.ndarray:
    """Map a file of token ids into memory without reading it; one dimension, integers.

    ``.npy`` says its own type, ``.bin`` and ``.u16`` hold little-endian uint16, ``.u32`` uint32. Raises
    :class:`UsageError` for a file that cannot be one.
    """
    try:
        if path.suffix == ".npy":
            mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            kind = np.dtype(RAW[path.suffix]).newbyteorder("<")
            size = path.stat().st_size
            require(size > 0, f"{path} is empty; it holds no tokens.")
            uneven = f"{path} has {size} bytes, no whole number of tokens of {kind.itemsize} bytes ({kind.name})."
            require(size % kind.itemsize == 0, uneven)
            mapped = np.memmap(path, dtype=kind, mode="r")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a file of tokens: {error}.") from error
    if mapped.ndim != 1 or mapped.dtype.kind not in "ui":
        found = f"{mapped.dtype} of shape {mapped.shape}"
        raise UsageError(f"{path} holds {found}; a file of tokens holds integers in one dimension.")
    return mapped


@dataclass(frozen=True, eq=False)
class TokenLoader(Loader):
    """Batches of random windows: batch ``i`` of the run is drawn from (seed, i) alone, so that nothing is replayed.

    Args:
        tokens: token ids, in memory or mapped.
        context: tokens of a window; the targets are the same window one token later.
        batch_size: windows per batch.
        vocabulary: ids from this one on are refused, as they are read.
        seed: of the windows.
        device: where batches are put.
    """

    tokens: np.ndarray
    _: KW_ONLY
    context: int
    batch_size: int
    vocabulary: int
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for less data than a window needs."""
        if len(self.tokens) <= self.context:
            raise UsageError(
                f"The data has {len(self.tokens)} tokens, and a context of {self.context} needs at least "
                f"{self.context + 1}; choose a shorter --context, or more data."
            )

    def __len__(self) -> int:
        """Return the batches that have as many tokens as the data."""
        return max(1, len(self.tokens) // (self.context * self.batch_size))

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets), int64 of shape (batch_size, context) each."""
        for index in range(start, len(self)):
            yield self.batch(epoch * len(self) + index)

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Return the places in the data at which the windows of each batch begin."""
        return map(self.places, range(epoch * len(self) + start, (epoch + 1) * len(self)))

    def source_of_rows(self) -> SourceOfRows:
        """Return the tokens, and how many windows begin in them."""
        return SourceOfRows(len(self.tokens) - self.context, [self.tokens])

    def places(self, number: int) -> Tensor:
        """Return where the windows of batch ``number`` of the run begin; int64 of shape (batch_size,)."""
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "windows", number))
        return torch.randint(len(self.tokens) - self.context, (self.batch_size,), generator=generator)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch ``number`` of the run."""
        windows = windows_at(self.tokens, self.places(number).tolist(), self.context)
        return split_targets(windows, self.vocabulary, self.device)

    def shuffled(self, seed: int) -> "TokenLoader":
        """Return a loader of other windows of the same data."""
        return replace(self, seed=seed)


def windows_at(tokens: np.ndarray, places: Iterable[int], context: int) -> np.ndarray:
    """Return the windows of ``context`` + 1 tokens that begin at ``places``; int64."""
    return np.stack([tokens[place : place + context + 1] for place in places]).astype(np.int64)


def split_targets(windows: np.ndarray, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of windows; raises :class:`UsageError` for ids outside the vocabulary."""
    least, most = int(windows.min()), int(windows.max())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise UsageError(
            f"The data holds the token id {wrong}, outside the vocabulary of {vocabulary}; set --vocabulary to that of "
            "the tokenizer that made the data."
        )
    tokens = torch.from_numpy(windows).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def windows_in_order(tokens: np.ndarray, context: int, most: int) -> np.ndarray:
    """Return up to ``most`` windows of ``context`` + 1 tokens, evenly spread over the data; int64."""
    count = min(most, max(1, (len(tokens) - 1) // context))
    places = np.linspace(0, len(tokens) - context - 1, count).astype(np.int64)
    return windows_at(tokens, places, context)


def unigram_entropy(tokens: np.ndarray, vocabulary: int, most: int = 10_000_000) -> float:
    """Return the entropy of single tokens in nats: what a model that knows only their frequencies reaches."""
    counts = np.bincount(np.asarray(tokens[:most], dtype=np.int64), minlength=vocabulary)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
