"""Reference casts and counts, computed from their definitions number by number in Python."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from loopscope.lowbit.casts import MAXIMA, SUMS, Cast, FloatFormat, FormatRegistry, RuleRegistry
from torch import Tensor


def decoded(number_format: type[FloatFormat]) -> list[float]:
    """Return all magnitudes, ascending, by decoding every code of exponent and mantissa bits as IEEE 754 does.

    Without exponent bits codes are whole numbers.
    """
    if not number_format.exponent_bits:
        return [float(code) for code in range(2**number_format.mantissa_bits)]
    bits, bias = number_format.mantissa_bits, 2 ** (number_format.exponent_bits - 1) - 1
    found = []
    for code in range(2 ** (number_format.exponent_bits + bits)):
        exponent, mantissa = divmod(code, 2**bits)
        fraction = mantissa / 2**bits + (exponent > 0)
        found.append(math.ldexp(fraction, max(exponent, 1) - bias))
    return [value for value in found if value <= number_format.maximum]


def ties(grid: Sequence[float]) -> list[float]:
    """Return the middles between neighbours."""
    return [(low + high) / 2 for low, high in pairwise(grid)]


def nearest(value: float, grid: Sequence[float]) -> float:
    """Return the number of a signed grid nearest to a value; ties to the even multiple of the spacing."""
    magnitude = abs(value)
    if math.isnan(value) or magnitude >= grid[-1]:
        return value if math.isnan(value) else math.copysign(grid[-1], value)
    above = bisect_left(grid, magnitude)
    if grid[above] == magnitude:
        return value
    low, high = grid[above - 1], grid[above]
    down, up = magnitude - low, high - magnitude
    even = low / (high - low) % 2 == 0
    return math.copysign(low if down < up or (down == up and even) else high, value)


def blocks_of(values: Tensor, block: int | None, rows: int = 1) -> Iterator[Sequence[int]]:
    """Yield, as positions in the flattened tensor, the values that share a scale."""
    if block is None:
        yield range(values.numel())
        return
    length = values.shape[-1] if values.ndim else 1
    height = values.shape[-2] if values.ndim > 1 else 1
    for matrix in range(0, values.numel(), height * length or 1):
        for top in range(0, height, rows):
            for start in range(0, length, block):
                columns = range(start, min(start + block, length))
                yield [
                    matrix + row * length + column for row in range(top, min(top + rows, height)) for column in columns
                ]


def flat(values: Tensor) -> list[float]:
    """Return the values as Python's floats, which are exact."""
    found: list[float] = values.double().reshape(-1).tolist()
    return found


def largest(values: Tensor, block: int | None, rows: int = 1) -> list[float]:
    """Return the largest finite magnitude of every block."""
    exact = flat(values)
    return [
        max((abs(exact[index]) for index in block if math.isfinite(exact[index])), default=0.0)
        for block in blocks_of(values, block, rows)
    ]


def narrowed(magnitude: float) -> float:
    """Return the smallest float32 number that is not below the magnitude, at most the largest one."""
    end = float(np.finfo(np.float32).max)
    if magnitude >= end:
        return end
    near = np.float32(magnitude)
    return float(near if float(near) >= magnitude else np.nextafter(near, np.float32(np.inf)))


def scales_of(cast: Cast, values: Tensor, earlier: Tensor | None = None) -> list[float]:
    """Return the scales of the blocks in turn, from the largest magnitudes by the registered rule."""
    rule = RuleRegistry.get(cast.rule)
    magnitudes = torch.tensor([narrowed(magnitude) for magnitude in largest(values, cast.blocks(), cast.rows)])
    if rule.history and earlier is not None:
        kept = earlier[-(cast.history or rule.history) :]
        past = kept.max() if cast.amax == "max" else kept[-1]
        magnitudes = past.reshape(1) if past > 0 else magnitudes
    given = magnitudes if cast.blocks() else magnitudes.reshape(())
    scales = flat(rule().scales(given, cast.number_format) * (cast.q_scalar * 2.0**cast.margin))
    return [power_of_two(scale) for scale in scales] if cast.scale_dtype == "e8m0" else scales


def power_of_two(scale: float) -> float:
    """Return the smallest number of E8M0 that is not below the scale, or its largest."""
    fraction, exponent = math.frexp(scale)
    return math.ldexp(1.0, min(max(exponent - (fraction == 0.5), -127), 127)) if scale else 2.0**-127


def cast_by_hand(cast: Cast, values: Tensor, scales: Sequence[float]) -> Tensor:
    """Quantise and dequantise to nearest: quotient and product in float32, or float64 for float64 tensors."""
    wide = np.float64 if values.dtype == torch.float64 else np.float32
    grid, end = decoded(FormatRegistry.get(cast.format)), torch.finfo(values.dtype).max
    exact = flat(values)
    with np.errstate(over="ignore"):
        for block, scale in zip(blocks_of(values, cast.blocks(), cast.rows), scales, strict=True):
            for index in block:
                quotient = float(wide(exact[index]) / wide(scale)) if scale else exact[index]
                product = float(wide(nearest(quotient, grid)) * wide(scale))
                exact[index] = product if math.isnan(product) else min(max(product, -end), end)
    return torch.tensor(exact, dtype=torch.float64).to(values.dtype).reshape(values.shape)


def counts_by_hand(cast: Cast, values: Tensor, rounded: Tensor, scales: Sequence[float]) -> dict[str, float]:
    """Count the losses number by number, in float64."""
    sums, maxima = dict.fromkeys(SUMS, 0.0), dict.fromkeys(MAXIMA, 0.0)
    before, after = flat(values), flat(rounded)
    for block, scale in zip(blocks_of(values, cast.blocks(), cast.rows), scales, strict=True):
        maxima["scale_max"] = max(maxima["scale_max"], scale if block else 0.0)
        maxima["inverse_scale_max"] = max(maxima["inverse_scale_max"], 1 / scale if block and scale else 0.0)
        limit = scale * cast.number_format.maximum or math.inf
        for index in block:
            _count_one(before[index], after[index], limit, sums, maxima)
    sums["quantizations"] = 1
    sums["overflow_count"] = float(sums["total_overflow_elements"] > 0)
    return {**sums, **maxima}


def _count_one(value: float, rounded: float, limit: float, sums: dict[str, float], maxima: dict[str, float]) -> None:
    sums["total_elements"] += 1
    if not math.isfinite(value):
        sums["non_finite_elements"] += 1
        return
    excess = abs(value) / limit
    if excess > 1:
        sums["total_overflow_elements"] += 1
        sums["excess_sum"] += excess
        maxima["excess_max"] = max(maxima["excess_max"], excess)
    sums["upper_half_elements"] += excess > 0.5
    sums["underflow_elements"] += value != 0 and rounded == 0
    sums["squared_error"] += (rounded - value) * (rounded - value)
    sums["squared_norm"] += value * value
