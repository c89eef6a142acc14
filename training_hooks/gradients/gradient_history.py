"""The newest gradients of a run, or sketches of them, as rows of a matrix, and what their inner products say."""

import torch
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import Remembered, Remembering
from loopscope.state import gradients, trainable
from torch import Tensor, nn

from ..measures import FlatSpace, splitmix64

CHUNK = 2**18
SMALLEST = 64
COLUMNS = 8192
MIB = 2**20


def check_dimensions(option: str, dimensions: int) -> None:
    """Refuse a number of dimensions that a sketch cannot have; 0 stands for no sketch."""
    if dimensions and (dimensions < SMALLEST or dimensions & (dimensions - 1)):
        raise UsageError(
            f"{option} is {dimensions}; it must be 0 (no projection) or a power of two of at least {SMALLEST}, "
            "such as 16384."
        )


@torch.no_grad()
def count_sketch(vector: Tensor, dimensions: int, key: int = 0) -> Tensor:
    """Return y of shape (d,), float32: y_b = Σ s_i x_i over the elements i whose bucket is b.

    Bucket b and sign s of every element are a hash of its place and of ``key``: the same in every run and on every
    machine. Inner products are kept in expectation, with variance at most (‖x‖²‖y‖² + (x·y)²)/d (Charikar, Chen and
    Farach-Colton 2002). Besides y it takes memory for a few chunks of 2¹⁸ elements, and time linear in the elements,
    whatever d is. On CUDA the elements of a bucket are added in no fixed order unless torch is told to be
    deterministic. ``vector`` has shape (n,), d is a power of two; the key, below 2²³, chooses one projection of the
    family.
    """
    sketch = torch.zeros(dimensions, device=vector.device)
    places = torch.arange(min(CHUNK, len(vector)), dtype=torch.int32, device=vector.device)
    starts = range(0, len(vector), CHUNK)
    for start, keys in zip(starts, chunk_keys(key, len(starts)), strict=True):
        part = vector[start : start + CHUNK].float().contiguous()
        hashed = _hashed(places[: len(part)], *keys)
        signed = (part.view(torch.int32) ^ (hashed & -(2**31))).view(torch.float32)  # that bit of a float32 is its sign
        sketch.index_add_(0, hashed & (dimensions - 1), signed)
    return sketch


def _hashed(places: Tensor, multiplier: int, offset: int) -> Tensor:
    """Hash int32 places: an affine map, then the finaliser of MurmurHash3, modulo 2³²."""
    hashed = places * multiplier
    hashed += offset
    hashed ^= (hashed >> 16) & 0xFFFF
    hashed *= 0x85EBCA6B - 2**32  # the bits of an int32
    hashed ^= (hashed >> 13) & 0x7FFFF
    hashed *= 0xC2B2AE35 - 2**32
    hashed ^= (hashed >> 16) & 0xFFFF
    return hashed


def chunk_keys(key: int, chunks: int) -> list[list[int]]:
    """Return an odd multiplier and an offset for every chunk: numbers of SplitMix64, cut to 32 bits."""
    numbers = splitmix64(0, 2 * chunks, skip=key << 40).int().view(-1, 2)
    numbers[:, 0] |= 1
    return numbers.tolist()  # type: ignore[no-any-return]


@torch.no_grad()
def row_products(some: Tensor, rows: Tensor) -> Tensor:
    """Return the inner products of ``some`` (m, n) with ``rows`` (k, n): shape (m, k), float64.

    They are formed in the dtype of the rows over at least 8192 columns at a time and added up in float64, which keeps
    float32 products to about 1e-7 of the largest.
    """
    width = rows.shape[1]
    step = max(COLUMNS, width // 1024)
    total = rows.new_zeros(len(some), len(rows), dtype=torch.float64)
    for start in range(0, width, step):
        total += some[:, start : start + step] @ rows[:, start : start + step].T
    return total


class GradientHistory(Remembering):
    """A ring of the newest gradients, each one row, and their Gram matrix, which grows by a row with every gradient.

    Memory: ``capacity`` × width × 4 bytes (8 for float64 gradients), the width being the number of trainable elements,
    or ``projection`` if that is not 0: then a :func:`count_sketch` of so many dimensions stands for each gradient. None
    is taken before the first gradient comes. Parameters without one count as zeros; sharded ones are gathered.
    """

    _rows = Remembered[Tensor | None](lambda: None)
    _gram = Remembered(lambda new: torch.zeros(new.capacity, new.capacity, dtype=torch.float64), by_options=True)
    count = Remembered(int)  # gradients taken since the last reset, those overwritten since included
    _waiting = Remembered(int)

    def __init__(self, capacity: int, projection: int = 0) -> None:
        self.capacity = capacity
        self.projection = projection

    def __len__(self) -> int:
        return min(self.count, self.capacity)

    def append(self, model: nn.Module) -> None:
        """Copy the model's live gradients into the next row; gradients of another width than before start anew."""
        row = FlatSpace(trainable(model)).flat(gradients(model))
        if self.projection:
            row = count_sketch(row, self.projection)
        if self._rows is None or self._rows.shape[1] != len(row):
            self.reset()
            self._rows = row.new_zeros(self.capacity, len(row))
        self._rows = self._rows.to(row.device)
        self._rows[self.count % self.capacity] = row
        self.count += 1
        self._waiting = min(self._waiting + 1, self.capacity)

    def gram(self) -> Tensor:
        """Return the inner products of the gradients, oldest first: shape (k, k), float64.

        Only the products with gradients that came since the last call are computed, all in one matrix product.
        """
        if self._rows is not None and self._waiting:
            rows = self._rows[: len(self)]
            places = [place % self.capacity for place in range(self.count - self._waiting, self.count)]
            first, last = places[0], places[-1] + 1
            waiting = rows[first:last] if first < last else torch.cat([rows[first:], rows[:last]])
            products = row_products(waiting, rows)
            self._gram = self._gram.to(products.device)
            self._gram[places, : len(self)] = products
            self._gram[: len(self), places] = products.T
            self._waiting = 0
        if self.count <= self.capacity:
            return self._gram[: self.count, : self.count]
        start = self.count % self.capacity
        return self._gram.roll((-start, -start), dims=(0, 1))

    @property
    def resolution(self) -> float:
        """The rounding error of the rows' dtype, relative."""
        return torch.finfo(torch.float32 if self._rows is None else self._rows.dtype).eps


def refuse_above(hook: str, memory: int, rows: int, model: nn.Module, projection: int) -> None:
    """Raise :class:`UnsuitableError` if that many gradients of a model take more than ``memory`` MiB."""
    space = FlatSpace(trainable(model))
    needed = rows * (projection * 4 or space.size * space.dtype.itemsize) / MIB
    if needed > memory:
        raise UnsuitableError(
            f"Hook {hook!r} keeps {rows} gradients, which takes {needed:,.0f} MiB for this model, and {hook}.memory "
            f"allows {memory}; project them with --hook-config {hook}.projection=16384 ({rows / 16:.1f} MiB), or raise "
            f"the limit with --hook-config {hook}.memory=N."
        )


def spectrum(gram: Tensor, resolution: float) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of a Gram matrix, largest first, shape (k,), and its eigenvectors as columns (k, k).

    Eigenvalues up to k·``resolution`` of the largest are rounding noise of the rows and are returned as zero, as in
    ``numpy.linalg.matrix_rank``. All are NaN if a gradient was not finite.
    """
    finite = gram.isfinite().all()
    values, vectors = torch.linalg.eigh(torch.where(finite, gram, 0.0))
    values, vectors = values.flip(0), vectors.flip(1)
    values = torch.where(values > len(gram) * resolution * values[0], values, 0.0)
    return torch.where(finite, values, torch.nan), vectors
