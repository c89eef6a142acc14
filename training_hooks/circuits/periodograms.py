"""Power of real signals by frequency, and the frequencies that an order of the data favours."""

import math
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


def power_of_columns(signal: Tensor) -> Tensor:
    """Return the power of each column of a real signal at the frequencies 1..n//2; shape (n // 2, columns), float64.

    ``signal`` has shape (n, columns) and runs along its rows. A frequency and its conjugate are one, so its power is
    2|X_k|²/n (|X_k|²/n at n/2, which is its own conjugate), X the discrete Fourier transform. The mean is left out:
    the powers add up to the squared distance of the signal from its mean (Parseval).
    """
    length = signal.shape[0]
    centred = signal.double() - signal[:1]  # equal rows then give exact zeros, not the rounding of their mean
    waves = torch.fft.rfft(centred, dim=0)[1:]
    power: Tensor = (waves.real.square() + waves.imag.square()) * (2 / length)
    if length % 2 == 0:
        power[-1] /= 2
    return power


def one_sided_power(signal: Tensor) -> Tensor:
    """Return :func:`power_of_columns` summed over the columns; shape (n // 2,), float64.

    >>> wave = torch.cos(2 * torch.pi * 3 * torch.arange(8) / 8)
    >>> one_sided_power(wave[:, None]).round().tolist()
    [0.0, 0.0, 4.0, 0.0]
    """
    return power_of_columns(signal).sum(dim=1)


@runtime_checkable
class StridedData(Protocol):
    """A configuration of data over the residues 0..p − 1 that one strategy sorts by a mod ``stride``."""

    p: int
    stride: int | None


def data_stride(config: Any, period: int) -> int:
    """Return the stride s of a configuration's data over ``period`` residues (⌊√p⌋ unless set), 0 if it has none."""
    if isinstance(config, StridedData) and config.p == period:
        return config.stride or math.isqrt(period)
    return 0


def stride_harmonics(period: int, stride: int) -> list[int]:
    """Return the frequencies nearest to j·p/s, j = 1..⌊s/2⌋: those of which a step by s is almost a whole turn.

    Data in the order of a mod s, then a, go through a in steps of s. Along that path a wave of frequency k turns by
    k·s/p, so those near a whole number of turns keep their phase for many batches: their gradients add up.

    >>> stride_harmonics(97, 9)
    [11, 22, 32, 43]
    """
    return sorted({min(round(j * period / stride), period // 2) for j in range(1, stride // 2 + 1)})
