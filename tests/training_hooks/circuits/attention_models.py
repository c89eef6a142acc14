"""Attention modules in several styles, and a reference implementation in float64."""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS = 12, 3


class Fused(nn.Module):
    """Attention from one projection, by ``scaled_dot_product_attention``."""

    def __init__(self, *, causal: bool = False, mask: Tensor | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.causal, self.mask = causal, mask

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (by_head(part, HEADS) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(query, key, value, self.mask, is_causal=self.causal)
        return self.proj(joined(mixed))


class WrittenOut(nn.Module):
    """Attention from three projections, with an explicit softmax and a mask of −10⁹."""

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (by_head(part(x), HEADS) for part in (self.query, self.key, self.value))
        scores = query @ key.mT / math.sqrt(WIDTH // HEADS)
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e9)
        return self.dense(joined(functional.softmax(scores, dim=-1) @ value))


class Grouped(nn.Module):
    """Attention with four query heads and two shared key and value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 16)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.o_proj = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = by_head(self.q_proj(x), 4), by_head(self.k_proj(x), 2), by_head(self.v_proj(x), 2)
        return self.o_proj(joined(functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)))


class Conv1D(nn.Module):
    """The linear layer of Hugging Face's GPT-2, with a weight of shape (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def mixed(query: Tensor, key: Tensor, value: Tensor, *, written_out: bool) -> Tensor:
    """Compute attention by PyTorch's function, or by a softmax between two products."""
    if not written_out:
        return functional.scaled_dot_product_attention(query, key, value)
    return torch.matmul((query @ key.mT / math.sqrt(query.shape[-1])).softmax(dim=-1), value)


class LikeGPT2(nn.Module):
    """One ``Conv1D`` to all queries, all keys, all values."""

    def __init__(self, *, written_out: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.written_out = written_out

    def forward(self, x: Tensor) -> Tensor:
        parts = (by_head(part, HEADS) for part in self.c_attn(x).split(WIDTH, dim=-1))
        return self.c_proj(joined(mixed(*parts, written_out=self.written_out)))


class ByHead(nn.Module):
    """A fused projection under any name, with rows of shape [key heads, queries per key head + 2, head_dim]."""

    def __init__(self, name: str = "query_key_value", *, shared: int = HEADS, written_out: bool = False) -> None:
        super().__init__()
        self.name, self.shared, self.written_out = name, shared, written_out
        self.add_module(name, nn.Linear(WIDTH, WIDTH + 2 * shared * WIDTH // HEADS))
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.get_submodule(self.name)(x).view(*x.shape[:2], self.shared, -1, WIDTH // HEADS)
        query = parts[..., :-2, :].flatten(2, 3).transpose(1, 2)
        repeats = HEADS // self.shared
        key, value = (parts[..., place, :].transpose(1, 2).repeat_interleave(repeats, dim=1) for place in (-2, -1))
        return self.dense(joined(mixed(query, key, value, written_out=self.written_out)))


class Inner(nn.Module):
    """BERT's attention proper, whose output projection is in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return joined(mixed(*(by_head(part(x), HEADS) for part in self.children()), written_out=True))


class LikeBERT(nn.Module):
    """Projections in ``self`` and in ``output``, with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.self = Inner()
        self.output = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return self.output["norm"](x + self.output["dense"](self.self(x)))


class Around(nn.Module):
    """A wrapper around attention with other arguments."""

    def __init__(self, inner: nn.Module, call) -> None:
        super().__init__()
        self.inner = inner
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


def by_head(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def brute_rows(query: Tensor, key: Tensor, visible: np.ndarray, heads: int, bias: float = 0.0) -> list[dict]:
    """Loop over samples, heads and queries; ``query`` and ``key`` are (batch, tokens, heads · head_dim).

    ``visible`` broadcasts to (batch, queries, keys).
    """
    query, key = (part.detach().double().numpy() for part in (query, key))
    visible = np.broadcast_to(visible, (len(query), query.shape[1], key.shape[1]))
    width, results = query.shape[2] // heads, []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        entropies, shares, scores = [], [], []
        for sample in range(len(query)):
            for place in range(query.shape[1]):
                seen = key[sample][visible[sample, place], part]
                if len(seen):
                    score = seen @ query[sample, place, part] / math.sqrt(width) + bias
                    p = np.exp(score - score.max())
                    p /= p.sum()
                    entropies.append(-sum(share * math.log(share) for share in p if share > 0))
                    shares += [entropies[-1] / math.log(len(seen))] if len(seen) > 1 else []
                    scores.append(score.max())
        results.append({"entropy": np.mean(entropies), "share": np.mean(shares), "largest": max(scores)})
    return results
