"""Attention calls of a model: their scores before the softmax, computed in blocks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

HIDDEN = -5e3
"""The score of a hidden key is at least this far below its product: additive masks use −∞, or −10⁴ and less."""
BLOCK_ELEMENTS, MORE_ELEMENTS = {"cpu": 2**18}, 2**22
"""Largest number of scores in memory at a time, by the kind of the device; more on those that have no entry.

A row of all heads may have more. On the CPU a small block stays in the cache.
"""


class ScoreBlock(NamedTuple):
    """Scores of some queries of some samples; the dtype is float32 or wider."""

    samples: slice
    scores: Tensor
    """Scores as they enter the softmax, shape (samples, heads, queries, keys); −∞ for hidden keys. Sinks, to which a
    layer attends without a key, are not included."""
    products: Tensor | None
    """scale·q·k of the same pairs, before soft caps and biases, −∞ for hidden keys; ``None`` if unknown."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall(ABC):
    """One attention call of a module.

    Its tensors are those of the training, detached: they must not be changed.
    """

    query: Tensor | None
    """Shape (batch, heads, queries, head_dim); ``None`` if unknown, as for scores from an ``einsum``."""
    key: Tensor | None
    """Shape (batch, key heads, keys, head_dim); consecutive query heads share a key head."""
    cap: float | Tensor | None = None
    """Bound c of soft-capped scores c·tanh(s/c); ``None``: the scores have no cap."""
    projections: tuple[tuple[Tensor, Tensor], ...] = ()
    """Weights of the linear layers that the module has used before this call, each with the layer's output."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """Numbers of samples, heads, queries and keys."""

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All tensors of the call."""

    @property
    def may_be_shifted(self) -> bool:
        """Whether the layer may have subtracted the maximum of each row from the scores, unnoticed."""
        return False

    @abstractmethod
    def block(self, samples: slice, queries: slice) -> ScoreBlock:
        """Return the scores of some samples and queries."""

    def blocks(self) -> Iterator[ScoreBlock]:
        """Yield all scores, a few samples at a time, or a few queries of one sample: memory is O(keys).

        Products are computed without autocasting, so that they are as exact as the operands.
        """
        samples, heads, queries, keys = self.shape
        row = max(1, heads * keys)
        most = BLOCK_ELEMENTS.get(self.tensors[0].device.type, MORE_ELEMENTS)
        queries_at_once = max(1, min(queries, most // row))
        samples_at_once = max(1, most // (row * max(1, queries))) if queries_at_once == queries else 1
        for first in range(0, samples, samples_at_once):
            for start in range(0, queries, queries_at_once):
                part = slice(first, first + samples_at_once), slice(start, start + queries_at_once)
                with torch.no_grad(), torch.autocast(self.tensors[0].device.type, enabled=False):
                    block = self.block(*part)
                yield block

    def _products(self, samples: slice, queries: slice) -> Tensor | None:
        """Return q·k in float32 or wider, shape (samples, heads, queries, keys)."""
        if self.query is None or self.key is None:
            return None
        query, key = _wide(self.query[samples, :, queries]), _wide(self.key[samples])
        if (repeats := query.shape[1] // key.shape[1]) > 1:
            key = key.repeat_interleave(repeats, dim=1)
        return query @ key.mT


@dataclass(frozen=True, kw_only=True)
class FusedCall(AttentionCall):
    """A call of a function that computes attention from queries and keys.

    Args:
        value: shape (batch, key heads, keys, value_dim), if known.
        scale: the factor of q·k, usually 1/√head_dim.
        mask: broadcasts to (batch, heads, queries, keys). A boolean mask is ``True`` for visible keys; a mask of
            numbers is added to the scores.
        causal: query i sees keys 0 to i only.
        window: query i sees keys from i − window + 1 on only.
        rows: shape (batch, queries), ``False`` for queries that are not computed, such as those of padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None = None
    scale: float
    mask: Tensor | None = None
    causal: bool = False
    window: int | None = None
    rows: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Numbers of samples, heads, queries and keys."""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def tensors(self) -> list[Tensor]:
        """Queries, keys, and the masks if there are any."""
        return [tensor for tensor in (self.query, self.key, self.mask, self.rows) if tensor is not None]

    def block(self, samples: slice, queries: slice) -> ScoreBlock:
        """Return the scores of some samples and queries."""
        products = self._products(samples, queries)
        assert products is not None
        products = products.mul_(self.scale)
        scores = products if self.cap is None else self.cap * torch.tanh(products / self.cap)
        hidden = [*self._hidden_by_place(queries, products)]
        if self.mask is not None:
            part = self.mask.expand(*self.shape)[samples, :, queries]
            if part.dtype is not torch.bool:
                scores = scores + _wide(part)
            hidden.append(~part if part.dtype is torch.bool else part <= HIDDEN)
        if self.rows is not None:
            hidden.append(~self.rows[samples, None, queries, None])
        return _hide(samples, scores, products, reduce(or_, hidden) if hidden else None)

    def _hidden_by_place(self, queries: slice, like: Tensor) -> Iterator[Tensor]:
        places = torch.arange(queries.start, queries.start + like.shape[2], device=like.device)[:, None]
        keys = torch.arange(like.shape[3], device=like.device)
        if self.causal:
            yield keys > places
        if self.window is not None:
            yield keys <= places - self.window


@dataclass(frozen=True, kw_only=True)
class WrittenCall(AttentionCall):
    """A softmax over scores that a layer has computed itself.

    Args:
        scores: the input of the softmax, shape (batch, heads, queries, keys and sinks).
        keys: the number of keys; the other columns are sinks.
        shifts: what the layer has subtracted from each row, shape (batch, heads, queries, 1), which the softmax
            ignores.
        scale: the factor of q·k, before and within a soft cap; ``None`` if unknown.
    """

    scores: Tensor
    keys: int
    shifts: tuple[Tensor, ...] = ()
    scale: float | Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Numbers of samples, heads, queries and keys."""
        return (*self.scores.shape[:3], self.keys)

    @property
    def tensors(self) -> list[Tensor]:
        """Scores, queries, keys, shifts, and factors that are tensors."""
        parts = (self.scores, self.query, self.key, *self.shifts, self.scale, self.cap)
        return [part for part in parts if isinstance(part, Tensor)]

    @property
    def may_be_shifted(self) -> bool:
        """Whether the layer may have subtracted the maximum of each row from the scores, unnoticed."""
        return not self.shifts

    def block(self, samples: slice, queries: slice) -> ScoreBlock:
        """Return the scores of some samples and queries."""
        scores = _wide(self.scores[samples, :, queries, : self.keys])
        for shift in self.shifts:
            scores = scores + _wide(shift.expand(*self.scores.shape[:3], 1)[samples, :, queries])
        capped = products = self._products(samples, queries) if self.scale is not None else None
        if products is not None:
            products = products * _part(self.scale, samples)
            capped = products
            if self.cap is not None:
                capped = torch.tanh(products) * _part(self.cap, samples)
                products = products * _part(self.cap, samples)
        hidden = scores - (0 if capped is None else capped) <= HIDDEN
        return _hide(samples, scores, products, hidden)


def _part(factor: float | Tensor | None, samples: slice) -> float | Tensor:
    """Return a factor for some samples; a tensor broadcasts to (batch, heads, 1, 1)."""
    if not isinstance(factor, Tensor):
        return 1.0 if factor is None else factor
    return _wide(factor[samples] if factor.ndim == 4 and len(factor) > 1 else factor)


def _hide(samples: slice, scores: Tensor, products: Tensor | None, hidden: Tensor | None) -> ScoreBlock:
    if hidden is None:
        return ScoreBlock(samples, scores, products)
    masked = scores.masked_fill(hidden, -torch.inf)
    if products is None or products is scores:
        return ScoreBlock(samples, masked, None if products is None else masked)
    return ScoreBlock(samples, masked, products.masked_fill(hidden, -torch.inf))


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()
