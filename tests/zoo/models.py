"""Small models of the zoo: a perceptron, a convolutional network, a GPT, and an LSTM."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.data import BLOCK, CLASSES, FEATURES, VOCABULARY, WAVES


def mlp(
    *hidden: int, out: int = CLASSES, activation: Callable[[], nn.Module] = nn.ReLU, dropout: float = 0.0
) -> nn.Sequential:
    """Return a perceptron with the given widths of its hidden layers, by default two of 64."""
    layers: list[nn.Module] = []
    width = FEATURES
    for size in hidden or (64, 64):
        layers += [nn.Linear(width, size), activation()]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = size
    return nn.Sequential(*layers, nn.Linear(width, out))


class ConvNet(nn.Module):
    """Three convolutions with BatchNorm, a mean over the pixels, and a linear head."""

    def __init__(self, width: int = 8, momentum: float = 0.1) -> None:
        super().__init__()
        sizes = [1, width, 2 * width, 4 * width]
        self.features = nn.Sequential(
            *(self._block(sizes[i], sizes[i + 1], stride=1 + (i > 0), momentum=momentum) for i in range(3))
        )
        self.head = nn.Linear(sizes[-1], CLASSES)

    @staticmethod
    def _block(inputs: int, outputs: int, stride: int, momentum: float) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs, momentum=momentum), nn.ReLU())

    def forward(self, pixels: Tensor) -> Tensor:
        """Map images to the logits of their classes."""
        hidden = self.features(pixels)
        return self.head(hidden.mean((2, 3)))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a norm before it."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, nn.Dropout(dropout)
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        rows, length, width = hidden.shape
        heads = self.qkv(self.first_norm(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, width)))
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.second_norm(hidden)))))


class Gpt(nn.Module):
    """A decoder over letters, with tied embeddings on request, initialised like GPT-2."""

    def __init__(
        self,
        width: int = 48,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        *,
        causal: bool = True,
        tied: bool = False,
        std: float = 0.02,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(BLOCK, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, letters: Tensor) -> Tensor:
        """Map (batch, tokens) to the logits of the next letters."""
        hidden = self.tokens(letters) + self.positions.weight[: letters.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class LstmClassifier(nn.Module):
    """An LSTM over a sequence of numbers, and a linear head on its last state."""

    def __init__(self, width: int = 32, layers: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, layers, batch_first=True)
        self.head = nn.Linear(width, WAVES)

    def forward(self, values: Tensor) -> Tensor:
        """Map (batch, length, 1) to the logits of the classes."""
        return self.head(self.lstm(values)[0][:, -1])


def class_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the cross-entropy of a batch of rows and labels."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def square_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean squared error of a batch of rows and targets."""
    return functional.mse_loss(model(batch[0]), batch[1])


class Ratings(nn.Module):
    """The product of the factors of users and items, initialised with a given standard deviation."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(200, 32), nn.Embedding(100, 32)
        self.mean = nn.Parameter(torch.tensor(3.0))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=std)

    def forward(self, pairs: Tensor) -> Tensor:
        """Map pairs of a user and an item to ratings."""
        users, items = pairs.unbind(1)
        return (self.users(users) * self.items(items)).sum(1) + self.mean


class Reversing(nn.Module):
    """A transformer with encoder and decoder over letters, whose decoder has a causal mask on request."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(BLOCK, 32)
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.head, self.causal = nn.Linear(32, VOCABULARY), causal

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Map source and target letters to the logits of the letters after those of the target."""
        length = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        embedded = [self.tokens(letters) + self.positions.weight[: letters.shape[1]] for letters in (source, target)]
        return self.head(self.transformer(*embedded, tgt_mask=mask, tgt_is_causal=self.causal))


def reversing_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the cross-entropy of the letters of the target, given the source and the letters before."""
    source, target = batch
    return functional.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


class FunctionalDropout(nn.Module):
    """A perceptron with ``functional.dropout``, in eval mode only on request."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.first, self.second, self.always = nn.Linear(FEATURES, 64), nn.Linear(64, CLASSES), always

    def forward(self, points: Tensor) -> Tensor:
        """Map points to the logits of their classes."""
        hidden = functional.relu(self.first(points))
        return self.second(functional.dropout(hidden, 0.5, self.training or self.always))


def letter_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the cross-entropy of the next letters."""
    (letters,) = batch
    return functional.cross_entropy(model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())


@torch.no_grad()
def accuracy(model: nn.Module, batches: list[list[Tensor]]) -> float:
    """Return the share of rows whose class is predicted."""
    hits = [(model(rows).argmax(-1) == labels).float() for rows, labels in batches]
    return torch.cat(hits).mean().item()
