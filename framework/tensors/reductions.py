"""Norms and inner products whose squares neither overflow nor underflow.

The square of a float32 number leaves the range of float32 above 2⁶⁴ and below 2⁻⁶³. On the CPU a sum is first computed
in float32, as torch's own functions do, and again in float64 if the result may be inaccurate. On other devices, where
reading a result would wait for the device, sums are computed in float64, or scaled where there is no float64.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

ACCURATE = 2.0**-70
"""Smallest magnitude of an accurate float32 sum of products: the underflow of 2³¹ products amounts to at most 2⁻⁹⁵."""
CHUNK = 2**16
"""Elements that the CPU converts to float64 at a time, so that they stay in its cache."""
PART = 2**12
"""Elements whose products the CPU adds up in float32."""
DEVICE_CHUNK = 2**24
"""The same on other devices, where it limits the memory."""
_kind = attrgetter("device", "layout", "dtype")
_SIMPLE_KINDS = frozenset((torch.device("cpu"), torch.strided, dtype) for dtype in (torch.float32, torch.float64))
"""Tensors on the CPU whose stored elements need no conversion."""


def widest(device: torch.device) -> torch.dtype:
    """Return the widest dtype of a device: float64, or float32 on Apple's MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def widest_of(tensor: Tensor) -> Tensor:
    """Return a tensor in the widest dtype of its device."""
    return tensor.to(widest(tensor.device))


def is_readable(tensor: Tensor) -> bool:
    """Return whether the host can read numbers without waiting for a device."""
    return tensor.device.type == "cpu"


def read_at_once(value: Tensor) -> float | Tensor:
    """Return a zero-dimensional tensor as a number if the host can read it without waiting for a device."""
    return value.item() if is_readable(value) else value


def may_overflow(norms: Tensor) -> bool:
    """Return whether float32 products of vectors with these norms may be inaccurate; true if that cannot be read."""
    if not is_readable(norms):
        return True
    return not all(norm == 0 or ACCURATE**0.5 <= norm <= ACCURATE**-0.5 for norm in norms.tolist())


def inner_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return a·b of every pair of tensors of one shape, shape (pairs,), in the widest dtype of the first device.

    Tensors may be sparse. Of complex ones it is the real part of a·b*, with b* the conjugate.
    """
    if not pairs:
        return torch.zeros(0, dtype=torch.float64)
    device = pairs[0][0].device
    reals = [(_real(a, b), _real(b, a)) for a, b in pairs]
    if not all(_is_plain(a) and _is_plain(b) for a, b in reals):
        return torch.stack([_wide_product(a, b).to(device) for a, b in reals])
    fast = torch.stack([(_at_least_float32(a) * _at_least_float32(b)).sum().double() for a, b in reals])
    return _corrected(fast, ACCURATE, _wide_product, reals)


def flat_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the same as :func:`inner_products` for pairs of vectors of one dtype, with BLAS on the CPU."""
    pairs = [(_real(a, b).flatten(), _real(b, a).flatten()) if a.is_complex() else (a, b) for a, b in pairs]
    if not all(_is_plain(a) for a, _ in pairs):
        return torch.stack([_wide_product(a, b) for a, b in pairs])
    fast = torch.stack([_dot(a, b) for a, b in pairs])
    return _corrected(fast, ACCURATE, _wide_product, pairs)


def norms_of(tensors: Sequence[Tensor], shorter: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the Euclidean norm of each tensor, shape (tensors,), in the widest dtype of the first device.

    On the CPU the numbers are those of :func:`torch.linalg.vector_norm` in float32 or wider, if these are accurate;
    there they are computed from ``shorter``, if given: a function that maps a tensor to one of the same norm.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    stored = [_stored(tensor) for tensor in tensors]
    if not all(map(_is_plain, stored)):
        return torch.stack([_wide_norm(values).to(tensors[0].device) for values in stored])
    fast = torch.stack([norm.double() for norm in _fast_norms(list(map(shorter, stored)) if shorter else stored)])
    return _corrected(fast, ACCURATE**0.5, _wide_norm, [(values,) for values in stored])


def length_of(tensor: Tensor) -> float | Tensor:
    """Return the Euclidean norm of one of the :func:`pieces` of a tensor, a number if the host can read it at once."""
    if not _is_plain(tensor):
        return norms_of([tensor])[0]
    flat = _stored(tensor).reshape(-1)
    square = float(_dot(flat, flat))
    if square < ACCURATE and not flat.any():  # the common case of a tensor that has not changed
        return 0.0
    return math.sqrt(square if ACCURATE <= square < math.inf else float(_wide_product(flat, flat)))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b of vectors on the CPU, float64: products of parts are summed in their dtype, and the parts in float64.

    Longer float32 sums of some BLAS libraries are wrong from the fourth digit on.
    """
    whole = len(a) // PART * PART
    if not whole:
        return torch.dot(a, b).double()
    rows = [vector[:whole].reshape(-1, PART) for vector in (a, b)]
    total: Tensor = torch.linalg.vecdot(*rows).sum(dtype=torch.float64)
    return total + torch.dot(a[whole:], b[whole:]) if whole < len(a) else total


def joined_length(lengths: Sequence[float | Tensor]) -> float | Tensor:
    """Return the Euclidean norm of a tensor from the norms of its :func:`pieces`."""
    numbers = [length for length in lengths if not isinstance(length, Tensor)]
    if len(numbers) == len(lengths):
        return math.hypot(*numbers)
    return total_of(tensor_of(lengths)) if len(lengths) > 1 else lengths[0]


def tensor_of(values: Sequence[float | Tensor]) -> Tensor:
    """Return numbers, or zero-dimensional tensors, as one tensor; of numbers in float64."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return torch.tensor(values, dtype=torch.float64)
    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors])


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of tensors of one shape and device: on the CPU of ``CHUNK`` elements, else the tensors.

    The parts share the memory of the tensors. Arithmetic on parts that stay in the cache takes half the time.
    """
    if tensors[0].device.type != "cpu" or not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
    else:
        yield from zip(*(torch.split(tensor.view(-1), CHUNK) for tensor in tensors), strict=True)


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row of a matrix, shape (rows,), in the widest dtype of the device."""
    if widest(rows.device) is not torch.float64:
        scales = power_of_two(rows.float().abs().amax(dim=1))
        lengths: Tensor = torch.linalg.vector_norm(rows.float() / scales[:, None], dim=1)
        return lengths * scales
    wide: Callable[[Tensor], Tensor] = partial(torch.linalg.vector_norm, dim=1, dtype=torch.float64)
    if not _is_plain(rows):
        return wide(rows)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype).double()
    doubtful = ~((norms >= ACCURATE**0.5) & norms.isfinite())
    if any(doubtful.tolist()):
        norms[doubtful] = wide(rows[doubtful])
    return norms


def joint_norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of tensors taken together, zero-dimensional, in the widest dtype of the first device.

    For float32 and float64 tensors it equals ``torch.nn.utils.get_total_norm`` wherever that is accurate.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    if is_readable(tensors[0]) and {*map(_kind, tensors)} <= _SIMPLE_KINDS:
        # Nearly always, and at each step of most runs: 20 µs for the gradients of three layers instead of 40.
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*tensors]))).double()
        if ACCURATE**0.5 <= norm.item() < math.inf:
            return norm
    device = tensors[0].device
    stored = [_stored(tensor) for tensor in tensors]
    # ||(a, b, ...)|| = ||(||a||, ||b||, ...)||
    fast = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in _fast_norms(stored)]))
    if all(map(_is_plain, stored)):
        return _corrected(fast.double()[None], ACCURATE**0.5, _joint_norm, [(stored,)])[0]
    wide = total_of(norms_of(stored))
    accurate = (fast >= ACCURATE**0.5) & fast.isfinite()
    return torch.where(accurate, fast.to(wide.dtype), wide)


def total_of(norms: Tensor) -> Tensor:
    """Return √Σn² of norms n, shape (norms,); from the norms of tensors it is that of the tensors taken together."""
    scale = power_of_two(norms.max()) if widest(norms.device) is torch.float32 else torch.ones_like(norms[0])
    total: Tensor = torch.linalg.vector_norm(widest_of(norms / scale))
    return total * scale


def cosine_of(product: Tensor, square: Tensor, other_square: Tensor) -> Tensor:
    """Return a·b / (‖a‖‖b‖) from a·b, ‖a‖² and ‖b‖², limited to [−1, 1], which rounding may leave; NaN for zeros."""
    return (product / (square.sqrt() * other_square.sqrt())).clamp(-1, 1)


def power_of_two(largest: Tensor) -> Tensor:
    """Return the power of two by which to divide numbers of at most this magnitude, so that they are within ±2.

    The division is exact. The result is 1 for zeros, infinities and NaN.
    """
    usable = largest.isfinite() & (largest > 0)
    # frexp gives m·2ᵉ with m in [0.5, 1), so x/2^(e−1) is in [1, 2); 2^e may be beyond the range
    exponent = torch.where(usable, largest, 1.0).frexp().exponent
    return torch.ldexp(torch.ones_like(largest), exponent - 1)


def scale_of(tensor: Tensor) -> Tensor:
    """Return the power of two by which to divide a tensor, so that its elements are within ±2; zero-dimensional."""
    wide = _at_least_float32(tensor)
    return power_of_two(wide.abs().amax()) if wide.numel() else wide.new_ones(())


def in_range(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors divided by one power of two, so that float32 sums of their products stay within its range.

    Angles between them, and ratios of their norms, stay the same. With float64, where no product of float32 numbers
    leaves the range, the tensors themselves are returned.
    """
    if not tensors or widest(tensors[0].device) is torch.float64:
        return tensors
    unit = torch.stack([scale_of(_stored(tensor)).to(tensors[0].device) for tensor in tensors]).amax()
    return tuple(tensor / unit for tensor in tensors)


def _joint_norm(stored: Sequence[Tensor]) -> Tensor:
    return total_of(norms_of(stored))


def _corrected(
    values: Tensor, accurate: float, again: Callable[..., Tensor], arguments: Sequence[tuple[Any, ...]]
) -> Tensor:
    """Replace the values that are below ``accurate``, infinite or NaN by those that ``again`` computes."""
    for place, value in enumerate(values.tolist()):
        if not accurate <= abs(value) < math.inf:
            values[place] = again(*arguments[place])
    return values


def _is_plain(tensor: Tensor) -> bool:
    return is_readable(tensor) and tensor.layout is torch.strided


def _stored(tensor: Tensor) -> Tensor:
    """Return the stored elements, which are all but zeros of a sparse tensor, as real numbers."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _real(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a factor as real numbers: a complex one as pairs, or as its real part if the other factor is real."""
    if not tensor.is_complex():
        return tensor
    dense = tensor.to_dense().resolve_conj()
    return torch.view_as_real(dense) if other.is_complex() else dense.real


def _fast_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each tensor as torch's clipping computes it, in float32 or wider."""
    # torch has no public foreach functions; its optimizers and clip_grad_norm_ use these private ones.
    return list(torch._foreach_norm([_at_least_float32(tensor) for tensor in tensors]))


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _wide_norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm in the widest dtype, of the numbers divided by a power of two where that is float32."""
    if widest(tensor.device) is torch.float64:
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
        return norm
    scale = scale_of(tensor)
    length: Tensor = torch.linalg.vector_norm(_at_least_float32(tensor) / scale)
    return length * scale


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_sparse or b.is_sparse:
        product: Tensor = (widest_of(a) * widest_of(b)).sum()
        return product.to_dense() if product.is_sparse else product
    if widest(a.device) is torch.float64:
        size = CHUNK if a.device.type == "cpu" else DEVICE_CHUNK
        parts = zip(torch.split(a.reshape(-1), size), torch.split(b.reshape(-1), size), strict=True)
        return torch.stack([torch.dot(first.double(), second.double()) for first, second in parts]).sum()
    scales = scale_of(a), scale_of(b)
    return (a / scales[0] * (b / scales[1])).sum() * scales[0] * scales[1]
