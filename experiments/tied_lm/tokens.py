"""Sequences of tokens: arrays in memory or files mapped into it, and batches as a function of (seed, step)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loopscope.data import Loader, derived_seed
from loopscope.errors import UsageError
from torch import Tensor

RAW = {".u16": np.uint16, ".u32": np.uint32, ".bin": np.uint16}
"""Raw files by suffix; ``.bin`` is the layout of nanoGPT."""
TOKEN_FILES = (".npy", *RAW)
INTEGERS = ("u", "i")


def open_tokens(path: Path) -> np.ndarray:
    """Map a file of token ids into memory without reading it; one dimension, integers.

    ``.npy`` says its own type, ``.bin`` and ``.u16`` hold little-endian uint16, ``.u32`` uint32. Raises
    :class:`UsageError` for a file that cannot be one.
    """
    try:
        if path.suffix == ".npy":
            mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            mapped = _raw(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a file of tokens: {error}.") from error
    if mapped.ndim != 1 or mapped.dtype.kind not in INTEGERS:
        raise UsageError(
            f"{path} holds {mapped.dtype} of shape {mapped.shape}; a file of tokens holds integers in one dimension."
        )
    return mapped


def _raw(path: Path) -> np.ndarray:
    kind = np.dtype(RAW[path.suffix]).newbyteorder("<")
    size = path.stat().st_size
    if not size:
        raise UsageError(f"{path} is empty; it holds no tokens.")
    if size % kind.itemsize:
        raise UsageError(f"{path} has {size} bytes, no whole number of tokens of {kind.itemsize} bytes ({kind.name}).")
    return np.memmap(path, dtype=kind, mode="r")


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

    def __init__(
        self, tokens: np.ndarray, *, context: int, batch_size: int, vocabulary: int, seed: int, device: torch.device
    ) -> None:
        if len(tokens) <= context:
            raise UsageError(
                f"The data has {len(tokens)} tokens, and a context of {context} needs at least {context + 1}; choose a "
                "shorter --context, or more data."
            )
        self._tokens = tokens
        self._options: dict[str, Any] = {
            "context": context, "batch_size": batch_size, "vocabulary": vocabulary, "device": device
        }  # fmt: skip
        self._seed = seed

    def __len__(self) -> int:
        """Return the batches that have as many tokens as the data."""
        in_a_batch: int = self._options["context"] * self._options["batch_size"]
        return max(1, len(self._tokens) // in_a_batch)

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets), int64 of shape (batch_size, context) each."""
        for index in range(start, len(self)):
            yield self.batch(epoch * len(self) + index)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch ``number`` of the run."""
        context, batch_size = self._options["context"], self._options["batch_size"]
        generator = torch.Generator().manual_seed(derived_seed(self._seed, "windows", number))
        places = torch.randint(len(self._tokens) - context, (batch_size,), generator=generator).tolist()
        windows = np.stack([self._tokens[place : place + context + 1] for place in places]).astype(np.int64)
        return split_targets(windows, self._options["vocabulary"], self._options["device"])

    def shuffled(self, seed: int) -> "TokenLoader":
        """Return a loader of other windows of the same data."""
        return TokenLoader(self._tokens, seed=seed, **self._options)


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
    return np.stack([tokens[place : place + context + 1] for place in places]).astype(np.int64)


def unigram_entropy(tokens: np.ndarray, vocabulary: int, most: int = 10_000_000) -> float:
    """Return the entropy of single tokens in nats: what a model that knows only their frequencies reaches."""
    counts = np.bincount(np.asarray(tokens[:most], dtype=np.int64), minlength=vocabulary)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
