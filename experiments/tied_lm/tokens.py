"""Token sequences in memory or in memory-mapped files, and batches as a function of (seed, step)."""

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from loopscope.data import Loader, SourceOfRows, derived_seed
from loopscope.errors import UsageError, require
from loopscope.option_words import option_text
from torch import Tensor

RAW = {".u16": np.uint16, ".u32": np.uint32, ".bin": np.uint16}
"""The types of raw files by suffix; ``.bin`` is the format of nanoGPT."""
TOKEN_FILES = (".npy", *RAW)


def open_tokens(path: Path) -> np.ndarray:
    """Memory-map a file of token ids; return an array of integers, shape (tokens,).

    ``.npy`` files contain their type; ``.bin`` and ``.u16`` files contain little-endian uint16, ``.u32`` files uint32.

    Raises:
        UsageError: if the file cannot be read, is empty, or does not contain integers in one dimension.
    """
    try:
        if path.suffix == ".npy":
            mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            kind = np.dtype(RAW[path.suffix]).newbyteorder("<")
            size = path.stat().st_size
            require(size > 0, f"{path} is empty; it must contain tokens.")
            token_type = f"{kind.itemsize} bytes, the size of a token ({kind.name})"
            require(size % kind.itemsize == 0, f"{path} has {size} bytes; it must have a multiple of {token_type}.")
            mapped = np.memmap(path, dtype=kind, mode="r")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a file of tokens: {error}.") from error
    if mapped.ndim != 1 or mapped.dtype.kind not in "ui":
        content = f"{mapped.dtype} of shape {mapped.shape}"
        raise UsageError(f"{path} contains {content}; a file of tokens must contain integers in one dimension.")
    return mapped


@dataclass(frozen=True, eq=False)
class TokenLoader(Loader):
    """Batches of random windows; batch ``i`` of the run depends on (seed, i) only, so a resumed run replays nothing.

    Args:
        tokens: token ids, in memory or memory-mapped.
        context: tokens of a window; the targets are the same window one token later.
        batch_size: windows per batch.
        vocabulary: size of the vocabulary; larger or equal ids raise an error when they are read.
        seed: seed of the windows.
        device: device of the batches.
    """

    tokens: np.ndarray
    _: KW_ONLY
    context: int
    batch_size: int
    vocabulary: int
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        """Check that the data has at least one window; raises :class:`UsageError` otherwise."""
        if len(self.tokens) <= self.context:
            raise UsageError(
                f"The data has {len(self.tokens)} tokens, but a context of {self.context} needs at least "
                f"{self.context + 1}; choose a shorter {option_text('context')}, or more data."
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch, which together have about as many tokens as the data."""
        return max(1, len(self.tokens) // (self.context * self.batch_size))

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets), int64 of shape (batch_size, context) each."""
        for index in range(start, len(self)):
            yield self.batch(epoch * len(self) + index)

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """Return the indices of the first tokens of the windows, for each batch."""
        return map(self.window_starts, range(epoch * len(self) + start, (epoch + 1) * len(self)))

    def source_of_rows(self) -> SourceOfRows:
        """Return the tokens, and the number of windows in them."""
        return SourceOfRows(len(self.tokens) - self.context, [self.tokens])

    def window_starts(self, number: int) -> Tensor:
        """Return the indices of the first tokens of the windows in batch ``number``; int64 of shape (batch_size,)."""
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "windows", number))
        return torch.randint(len(self.tokens) - self.context, (self.batch_size,), generator=generator)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch ``number`` of the run."""
        windows = cut_windows(self.tokens, self.window_starts(number).tolist(), self.context)
        return split_targets(windows, self.vocabulary, self.device)

    def shuffled(self, seed: int) -> "TokenLoader":
        """Return a loader of other windows of the same data."""
        return replace(self, seed=seed)


def cut_windows(tokens: np.ndarray, starts: Iterable[int], context: int) -> np.ndarray:
    """Return the windows of ``context`` + 1 tokens that begin at ``starts``; int64 of shape (windows, context + 1)."""
    return np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)


def split_targets(windows: np.ndarray, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of windows, shape (windows, context) each.

    Raises:
        UsageError: if a token id is outside the vocabulary.
    """
    smallest, largest = int(windows.min()), int(windows.max())
    if smallest < 0 or largest >= vocabulary:
        invalid = smallest if smallest < 0 else largest
        raise UsageError(
            f"The data contains the token id {invalid}, which is outside the vocabulary of {vocabulary}; set "
            f"{option_text('vocabulary')} to the vocabulary size of the data's tokenizer."
        )
    tokens = torch.from_numpy(windows).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def evenly_spaced_windows(tokens: np.ndarray, context: int, limit: int) -> np.ndarray:
    """Return up to ``limit`` windows of the data at equal distances; int64 of shape (windows, context + 1)."""
    count = min(limit, max(1, (len(tokens) - 1) // context))
    starts = np.linspace(0, len(tokens) - context - 1, count).astype(np.int64)
    return cut_windows(tokens, starts, context)


def unigram_entropy(tokens: np.ndarray, vocabulary: int, limit: int = 10_000_000) -> float:
    """Return the entropy of the first ``limit`` tokens in nats: the loss of a model that only has their frequencies."""
    counts = np.bincount(np.asarray(tokens[:limit], dtype=np.int64), minlength=vocabulary)
    shares = counts[counts > 0] / counts.sum()  # −Σ p ln p over the tokens that occur
    return float(-(shares * np.log(shares)).sum())
