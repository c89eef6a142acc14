"""A decoder language model in the style of OLMo and Llama."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The dimensions of a decoder.

    Args:
        vocabulary: number of tokens; for texts, the size of the byte-pair encoding that is trained on them.
        context: tokens of a sequence.
        width: width of the residual stream.
        layers: transformer layers.
        heads: attention heads per layer; width must be a multiple of twice this number.
        hidden: inner width of the feed-forward layers; by default 8/3 of width, rounded up to a multiple of 32.
        weight_tying: use the embedding matrix as output projection.
        qk_norm: normalise queries and keys.
    """

    vocabulary: int = 4096
    context: int = 256
    width: int = 256
    layers: int = 4
    heads: int = 4
    hidden: int | None = None
    weight_tying: bool = True
    qk_norm: bool = False


def rotary_angles(context: int, head_width: int, base: float = 10_000.0) -> Tensor:
    """Return the angles of rotary positions (arXiv 2104.09864), shape (context, head_width / 2)."""
    # angle[t, i] = t·base^(−2i/head_width), so wavelengths range from 2π to 2π·base
    frequencies = base ** -(torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    return torch.outer(torch.arange(context, dtype=torch.float64), frequencies).float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of coordinates, one from each half of a head, by the angles of their position.

    ``x`` has shape (batch, heads, tokens, head_width), ``cosine`` and ``sine`` (tokens, head_width / 2).
    """
    # (x₁, x₂) ↦ (x₁ cos − x₂ sin, x₁ sin + x₂ cos) for the halves x₁ and x₂ of a head
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class CausalAttention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads, self.head_width = shape.heads, shape.width // shape.heads
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_width, eps=1e-6) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_width, eps=1e-6) if shape.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        query = rotate(self.q_norm(self._by_head(self.q_proj(x))), cosine, sine)
        key = rotate(self.k_norm(self._by_head(self.k_proj(x))), cosine, sine)
        value = self._by_head(self.v_proj(x))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mapped: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return mapped

    def _by_head(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        # -1, since under tensor parallelism a rank has only a part of the heads
        return x.view(batch, tokens, -1, self.head_width).transpose(1, 2)


class SwiGLU(nn.Module):
    """A gated feed-forward layer (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        mapped: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return mapped


class DecoderBlock(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual connection around it."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.attention = CausalAttention(shape)
        self.ff_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.ff = SwiGLU(shape.width, shape.hidden or 32 * math.ceil(8 * shape.width / 3 / 32))

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        mapped: Tensor = x + self.ff(self.ff_norm(x))
        return mapped


class Decoder(nn.Module):
    """Token embedding, blocks, norm and output projection, which with ``weight_tying`` uses the embedding matrix."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        angles = rotary_angles(shape.context, shape.width // shape.heads)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            # Matrices have a standard deviation of 0.02, those at the end of a residual branch 0.02/√(2·layers), so
            # that the variance of the residual stream does not grow with the number of layers (GPT-2).
            if parameter.ndim == 2:
                ends_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** (0.5 if ends_branch else 0))
        if shape.weight_tying:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens) token ids to (batch, tokens, vocabulary) logits of the next token."""
        length = tokens.shape[1]
        cosine, sine = self.cosine[:length], self.sine[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits: Tensor = self.head(self.norm(x))
        return logits


def language_model_loss(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Return the mean cross-entropy in nats, plus ``z_loss`` times the mean of log²Z (arXiv 2204.02311).

    ``logits`` has shape (..., vocabulary), ``targets`` (...); Z is the sum of the exponentials of the logits.
    """
    # −log p(target) + z_loss·(log Σ exp(logits))², averaged over all positions
    flat = logits.flatten(0, -2).float()
    loss = functional.cross_entropy(flat, targets.flatten())
    return loss + z_loss * flat.logsumexp(-1).square().mean() if z_loss else loss


@torch.no_grad()
def generate(model: Decoder, prompt: Tensor, length: int, generator: torch.Generator, temperature: float) -> Tensor:
    """Continue a prompt of shape (tokens,) by ``length`` sampled tokens, each given the previous ``context`` tokens."""
    tokens = prompt
    context = model.shape.context
    for _ in range(length):
        logits = model(tokens[None, -context:])[0, -1].float()
        probabilities = torch.softmax(logits / temperature, dim=-1)
        next_token = torch.multinomial(probabilities.cpu(), 1, generator=generator).to(tokens.device)
        tokens = torch.cat((tokens, next_token))
    return tokens
