"""Small data sets that can be learned, drawn from separate generators."""

import math
import random
from functools import cache

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

CLASSES, FEATURES, SIDE, BLOCK = 10, 20, 16, 32
LENGTH, WAVES = 24, 5


def generator(seed: int) -> torch.Generator:
    """Return a generator that is independent of torch's global one."""
    return torch.Generator().manual_seed(seed)


def loader(data: Dataset, batch: int = 32, shuffle: bool = True) -> DataLoader:
    """Return the batches of a data set."""
    return DataLoader(data, batch, shuffle=shuffle)


def clusters(rows: int, seed: int, spread: float = 1.0) -> TensorDataset:
    """Return points of ten Gaussian clusters with their numbers as labels."""
    centres = torch.randn(CLASSES, FEATURES, generator=generator(0))
    labels = torch.randint(CLASSES, (rows,), generator=generator(seed))
    noise = torch.randn(rows, FEATURES, generator=generator(seed + 1))
    return TensorDataset(centres[labels] + spread * noise, labels)


def curve(rows: int, seed: int, scale: float = 1.0, noise: float = 0.1) -> TensorDataset:
    """Return points with a smooth function of three of their features as target; shape (rows, 1)."""
    points = torch.randn(rows, FEATURES, generator=generator(seed))
    values = torch.sin(points[:, 0]) + 0.5 * points[:, 1] * points[:, 2]
    values = values + noise * torch.randn(rows, generator=generator(seed + 1))
    return TensorDataset(points, scale * values[:, None])


def images(rows: int, seed: int, noise: float = 0.5) -> TensorDataset:
    """Return images of gratings, whose directions are their labels, with random phases and noise."""
    labels = torch.randint(CLASSES, (rows,), generator=generator(seed))
    phases = 2 * math.pi * torch.rand(rows, generator=generator(seed + 1))
    axis = torch.arange(SIDE, dtype=torch.float32)
    angles = math.pi * labels / CLASSES
    across = axis[None, :, None] * angles.cos()[:, None, None] + axis[None, None, :] * angles.sin()[:, None, None]
    patterns = torch.sin(across + phases[:, None, None])
    pixels = patterns + noise * torch.randn(rows, SIDE, SIDE, generator=generator(seed + 2))
    return TensorDataset(pixels[:, None], labels)


def waves(rows: int, seed: int, noise: float = 0.3) -> TensorDataset:
    """Return noisy sine waves, whose frequencies are their labels; shape (rows, 24, 1)."""
    labels = torch.randint(WAVES, (rows,), generator=generator(seed))
    phases = 2 * math.pi * torch.rand(rows, generator=generator(seed + 1))
    times = torch.arange(LENGTH, dtype=torch.float32)
    values = torch.sin(times * (0.3 + 0.3 * labels[:, None]) + phases[:, None])
    return TensorDataset((values + noise * torch.randn(rows, LENGTH, generator=generator(seed + 2)))[..., None], labels)


@cache
def tokens() -> Tensor:
    """Return a text of sums such as ``12+7=19;`` as numbers of its letters."""
    sums = [f"{a}+{b}={a + b};" for a in range(60) for b in range(60)]
    text = "".join(random.Random(0).sample(sums, len(sums)))
    return torch.tensor([LETTERS.index(letter) for letter in text])


LETTERS = "0123456789+=;"
PADDING = len(LETTERS)
VOCABULARY = len(LETTERS) + 1


def text(rows: int, part: str = "train") -> TensorDataset:
    """Return rows of 33 letters, one more than the context: the first 90 % of the text, or the rest."""
    letters = tokens()
    border = len(letters) * 9 // 10
    letters = letters[:border] if part == "train" else letters[border:]
    starts = torch.randint(len(letters) - BLOCK, (rows,), generator=generator(rows + len(part)))
    return TensorDataset(torch.stack([letters[start : start + BLOCK + 1] for start in starts]))


def ratings(rows: int, seed: int) -> TensorDataset:
    """Return pairs of one of 200 users and one of 100 items, and ratings between 1 and 5 with a deviation of 1."""
    users = torch.randn(200, 4, generator=generator(7)) / 2
    items = torch.randn(100, 4, generator=generator(8)) / 2
    pairs = torch.stack([torch.randint(size, (rows,), generator=generator(seed)) for size in (200, 100)], dim=1)
    values = 3 + 2 * (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1)
    return TensorDataset(pairs, values.clamp(1, 5))


def reversed_letters(rows: int, seed: int) -> TensorDataset:
    """Return rows of 10 letters, and the same letters in reverse order after a start symbol."""
    letters = torch.randint(3, VOCABULARY, (rows, 10), generator=generator(seed))
    return TensorDataset(letters, torch.cat([torch.full((rows, 1), 1), letters.flip(1)], dim=1))


def padded_sums(rows: int, seed: int) -> TensorDataset:
    """Return one sum in each row of 33 letters, filled with padding on the right."""
    drawn = random.Random(seed)
    lines = []
    for _ in range(rows):
        a, b = drawn.randrange(60), drawn.randrange(60)
        numbers = [LETTERS.index(letter) for letter in f"{a}+{b}={a + b};"]
        lines.append(numbers + [PADDING] * (BLOCK + 1 - len(numbers)))
    return TensorDataset(torch.tensor(lines))
