"""The newest gradients of a run, or sketches of them, as rows of a matrix, with their Gram matrix and spectrum."""

import torch
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import Remembered, Remembering
from loopscope.option_words import hook_option_text
from loopscope.tensors import gradients, may_overflow, norms_of, power_of_two, trainable
from torch import Tensor, nn

from ..measures import FlatSpace, splitmix64

CHUNK = 2**18  # elements that are hashed at once
SMALLEST = 64  # dimensions of a sketch
COLUMNS = 8192  # the least number of columns in one float32 product
MIB = 2**20
LEAST_LIMIT = 128  # MiB that kept gradients may take with any model: 60 gradients of half a million elements


def check_dimensions(option: str, dimensions: int) -> None:
    """Check the number of dimensions of a sketch; 0 stands for no sketch.

    Raises:
        UsageError: if it is neither 0 nor a power of two of at least 64.
    """
    if dimensions and (dimensions < SMALLEST or dimensions & (dimensions - 1)):
        raise UsageError(
            f"{option} is {dimensions}; it must be 0 (no projection) or a power of two of at least {SMALLEST}, "
            "such as 16384."
        )


@torch.no_grad()
def count_sketch(vector: Tensor, dimensions: int, key: int = 0) -> Tensor:
    """Return y of shape (d,), float32: y_b = Σ s_i x_i over the elements i whose bucket is b.

    A hash of its index and of ``key`` assigns a bucket b and a sign s to every element, the same in every run and on
    every machine. The sketch preserves inner products in expectation, with variance at most (‖x‖²‖y‖² + (x·y)²)/d
    (Charikar, Chen and Farach-Colton 2002). Besides y it takes memory for a few chunks of 2¹⁸ elements; its time is
    linear in the number of elements and independent of d. On CUDA the order in which the elements of a bucket are added
    varies, unless ``torch.use_deterministic_algorithms`` is on.

    Args:
        vector: shape (n,).
        dimensions: d, a power of two.
        key: chooses one projection of the family; below 2²³.
    """
    sketch = torch.zeros(dimensions, device=vector.device)
    indices = torch.arange(min(CHUNK, len(vector)), dtype=torch.int32, device=vector.device)
    starts = range(0, len(vector), CHUNK)
    for start, keys in zip(starts, chunk_keys(key, len(starts)), strict=True):
        part = vector[start : start + CHUNK].float().contiguous()
        hashed = _hash(indices[: len(part)], *keys)
        # The top bit of the hash is s: XOR with the bits of a float32 flips its sign. The low bits are b.
        signed = (part.view(torch.int32) ^ (hashed & -(2**31))).view(torch.float32)
        sketch.index_add_(0, hashed & (dimensions - 1), signed)
    return sketch


def _hash(indices: Tensor, multiplier: int, offset: int) -> Tensor:
    """Hash int32 indices: an affine map, then the finaliser of MurmurHash3, modulo 2³²."""
    # Shifts of int32 copy the sign bit, so a mask makes each of them the logical shift of MurmurHash3.
    hashed = indices * multiplier
    hashed += offset
    hashed ^= (hashed >> 16) & 0xFFFF
    hashed *= 0x85EBCA6B - 2**32  # the constant of MurmurHash3 as an int32
    hashed ^= (hashed >> 13) & 0x7FFFF
    hashed *= 0xC2B2AE35 - 2**32
    hashed ^= (hashed >> 16) & 0xFFFF
    return hashed


def chunk_keys(key: int, chunks: int) -> list[list[int]]:
    """Return an odd multiplier and an offset for every chunk: SplitMix64 numbers, truncated to 32 bits."""
    # Every key has 2⁴⁰ numbers; a key below 2²³ keeps their indices within int64.
    numbers = splitmix64(0, 2 * chunks, skip=key << 40).int().view(-1, 2)
    # Multiplication by an odd number is a bijection modulo 2³², so no two indices of a chunk collide in it.
    numbers[:, 0] |= 1
    return numbers.tolist()  # type: ignore[no-any-return]


@torch.no_grad()
def row_products(new_rows: Tensor, rows: Tensor) -> Tensor:
    """Return the inner products of ``new_rows`` (m, n) with ``rows`` (k, n): shape (m, k), float64.

    Blocks of at least 8192 columns are multiplied in the dtype of the rows and added up in float64, which keeps the
    error of float32 products to about 1e-7 of the largest. Rows whose products could leave the range of float32 are
    divided by powers of two first.
    """
    norms = [norms_of(matrix.unbind()) for matrix in (new_rows, rows)]
    is_scaled = any(map(may_overflow, norms))
    scales = [_scales(each, rows.dtype) if is_scaled else torch.ones_like(each)[:, None] for each in norms]
    # Σ_c A_c·B_cᵀ over blocks c of columns, shape (m, k)
    width = rows.shape[1]
    step = max(COLUMNS, width // 1024)
    total = rows.new_zeros(len(new_rows), len(rows), dtype=torch.float64)
    for start in range(0, width, step):
        first, second = new_rows[:, start : start + step], rows[:, start : start + step]
        if is_scaled:
            first, second = (block / scale.to(block) for block, scale in zip((first, second), scales, strict=True))
        total += first @ second.T
    return total * (scales[0] @ scales[1].T)


def _scales(norms: Tensor, dtype: torch.dtype) -> Tensor:
    """Return powers of two near the norms of rows, shape (rows, 1), in the dtype of the norms."""
    # rows beyond the largest power of two of their dtype are still within its range after the division
    return power_of_two(norms.clamp(max=torch.finfo(dtype).max / 4))[:, None]


class GradientHistory(Remembering):
    """A ring buffer of the newest gradients, one per row, and their Gram matrix.

    Memory: ``capacity`` × width × 4 bytes (8 for float64 gradients). The width is the number of trainable elements, or
    ``projection`` if that is not 0: a :func:`count_sketch` with this many dimensions then replaces each gradient. The
    buffer is allocated with the first gradient. Parameters without a gradient count as zeros; sharded ones are
    gathered.
    """

    _rows = Remembered[Tensor | None](None)
    _gram = Remembered(lambda new: torch.zeros(new.capacity, new.capacity, dtype=torch.float64), by_options=True)
    count = Remembered(int)  # gradients since the last reset, including overwritten ones
    _waiting = Remembered(int)  # newest gradients whose products are not in the Gram matrix yet

    def __init__(self, capacity: int, projection: int = 0) -> None:
        self.capacity = capacity
        self.projection = projection

    def __len__(self) -> int:
        return min(self.count, self.capacity)

    def append(self, model: nn.Module) -> None:
        """Copy the model's current gradients into the next row; discard all earlier rows if the width has changed."""
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

        Only the rows that were appended since the last call are multiplied, together in one matrix product.
        """
        if self._rows is not None and self._waiting:
            rows = self._rows[: len(self)]
            first, last = (self.count - self._waiting) % self.capacity, (self.count - 1) % self.capacity + 1
            # A range of rows is a view; a range that wraps around the end of the buffer needs a copy.
            ranges = [slice(first, last)] if first < last else [slice(first, self.capacity), slice(0, last)]
            new_rows = rows[ranges[0]] if first < last else torch.cat([rows[part] for part in ranges])
            products = row_products(new_rows, rows)
            self._gram = self._gram.to(products.device)
            # By slices, since a list of indices would be copied to the device.
            sizes = [part.stop - part.start for part in ranges]
            for part, values in zip(ranges, torch.split(products, sizes), strict=True):
                self._gram[part, : len(self)] = values
                self._gram[: len(self), part] = values.T
            self._waiting = 0
        if self.count <= self.capacity:
            return self._gram[: self.count, : self.count]
        # In a full ring buffer the row to be overwritten next is the oldest.
        start = self.count % self.capacity
        return self._gram.roll((-start, -start), dims=(0, 1))

    @property
    def resolution(self) -> float:
        """The machine epsilon of the rows' dtype."""
        return torch.finfo(torch.float32 if self._rows is None else self._rows.dtype).eps


def check_memory(hook: str, memory: int | None, rows: int, model: nn.Module, projection: int) -> None:
    """Check that ``rows`` gradients of a model take at most ``memory`` MiB.

    By default they take at most as much as the trained parameters, or 128 MiB if that is more.

    Raises:
        UnsuitableError: if they take more.
    """
    space = FlatSpace(trainable(model))
    size = space.size * space.dtype.itemsize / MIB
    needed = rows * (projection * 4 / MIB or size)
    limit = max(LEAST_LIMIT, round(size)) if memory is None else memory
    if needed > limit:
        raise UnsuitableError(
            f"Hook {hook!r} keeps {rows} gradients, which take {needed:,.0f} MiB for this model, but {hook}.memory "
            f"allows {limit:,}; project them with {hook_option_text(hook, projection=16384)} ({rows / 16:.1f} MiB), or "
            f"raise the limit with {hook_option_text(hook, memory='N')}."
        )


def spectrum(gram: Tensor, resolution: float) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of a Gram matrix, largest first, shape (k,), and its eigenvectors as columns (k, k).

    Eigenvalues of at most k·``resolution`` times the largest one are rounding noise and returned as zero, as in
    ``numpy.linalg.matrix_rank``. All are NaN if a gradient was not finite.
    """
    # eigh raises an error for matrices with NaN, so decompose zeros instead and replace the result.
    finite = gram.isfinite().all()
    values, vectors = torch.linalg.eigh(torch.where(finite, gram, 0.0))
    values, vectors = values.flip(0), vectors.flip(1)
    values = torch.where(values > len(gram) * resolution * values[0], values, 0.0)
    return torch.where(finite, values, torch.nan), vectors
