"""A small transformer that classifies a pair of tokens."""

from torch import Tensor, nn
from torch.nn import functional

EMBEDDING_STD = 0.1
"""With 0.05 or less the model never starts to learn from a sorted order; with 1 it memorises and never generalises."""


class SelfAttention(nn.Module):
    """Multi-head self-attention without a mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        mapped: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return mapped


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual connection around it."""

    def __init__(self, width: int, heads: int, ff_dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.ff_norm = nn.LayerNorm(width)
        self.ff_in = nn.Linear(width, ff_dim)
        self.ff_out = nn.Linear(ff_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        mapped: Tensor = x + self.ff_out(functional.relu(self.ff_in(self.ff_norm(x))))
        return mapped


class GrokkingTransformer(nn.Module):
    """Token embedding, ``layers`` blocks, mean over the tokens, one logit per residue.

    There are no position embeddings, since a + b does not depend on the order of the pair.
    """

    def __init__(self, p: int, embed_dim: int, num_heads: int, layers: int, ff_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(p, embed_dim)
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, ff_dim) for _ in range(layers))
        self.norm = nn.LayerNorm(embed_dim)
        self.decoder = nn.Linear(embed_dim, p)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)

    def forward(self, pairs: Tensor) -> Tensor:
        """Map (batch, 2) token ids to (batch, p) logits."""
        x = self.embedding(pairs)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.decoder(self.norm(x).mean(dim=1))
        return logits
