"""The gradient noise scale: the batch size at which signal and noise in the gradient have the same energy."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.data import micro_batches, preserved_loader, rows
from loopscope.errors import require
from loopscope.hooks import Metrics, RunInfo
from loopscope.state import tensors_of
from loopscope.tensors import Vector, accumulate, dot
from torch import Tensor

from ..measures import notice

ROWS_CHECKED = 256  # rows whose order is checked before the run
SIGNIFICANT = 4.0  # standard errors from which on a correlation of neighbouring rows is not due to chance


def signal_and_noise(norms: tuple[Tensor, Tensor], small: float, big: float) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of |G|², G the true gradient, and of S = tr Σ, Σ the covariance of a row's gradient.

    Both follow from E|G_B|² = |G|² + S/B at two batch sizes B (arXiv 1812.06162, appendix A.1). The estimate of |G|²
    can be negative.

    Args:
        norms: |G_small|² and |G_big|², zero-dimensional.
        small: B_small, the number of rows behind |G_small|².
        big: B_big, the number of rows behind |G_big|².
    """
    small_norm, big_norm = norms
    # |G|² = (B_big|G_big|² − B_small|G_small|²) / (B_big − B_small)
    signal = (big * big_norm - small * small_norm) / (big - small)
    # S = (|G_small|² − |G_big|²) / (1/B_small − 1/B_big)
    noise = (small_norm - big_norm) / (1 / small - 1 / big)
    return signal, noise


def part_norms(gradients: Iterable[Vector], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return |G_small|² and |G_big|² from the mean gradients of parts of a batch, zero-dimensional float64.

    G_big is the mean of the parts' gradients, and |G_small|² the mean of their squared norms, both weighted by rows.
    With b_i of B rows in part i, E|G_small|² = |G|² + S·Σ(b_i/B)/b_i = |G|² + S·n/B, so B_small = B/n is exact even if
    the n parts differ in size. Only the mean of the gradients is kept in memory.

    Args:
        gradients: the mean gradient of each part.
        counts: the number of rows of each part.
    """
    mean: dict[str, Tensor] = {}
    squares = []
    for gradient, count in zip(gradients, counts, strict=True):
        share = count / sum(counts)
        mean = accumulate(mean, gradient, share)
        squares.append(share * dot(gradient, gradient))
        del gradient  # so that its memory is free when the iterator computes the next one
    return torch.stack(squares).sum(), dot(mean, mean)


def standard_errors(sums: Tensor, moments: Tensor, cubes: float) -> dict[str, Tensor]:
    """Return the standard errors of the means of |G|² and S over measurements, and of their ratio, by metric.

    Independent measurements x of weights w have a mean m with the squared error Σw²(x − m)²/(Σw)². A factor makes it
    unbiased for measurements of equal variance (n/(n − 1) for n equal weights). To first order, the ratio B = S/|G|² of
    the means has the error of the mean of (S − B·|G|²)/|G|² (delta method).

    Args:
        sums: Σwu with u = (1, |G|², S), shape (3,).
        moments: Σw²uuᵀ, shape (3, 3).
        cubes: Σw³.
    """
    _, signal, noise = sums / sums[0]
    zero, one = torch.zeros_like(signal), torch.ones_like(signal)
    # Each row d of (3, 3) gives a deviation d·u: |G|² − mean, S − mean, (S − B·|G|²)/|G|²; Σw²(d·u)² = d Σw²uuᵀ dᵀ
    coefficients = [(-signal, one, zero), (-noise, zero, one), (zero, -noise / signal / signal, one / signal)]
    deviations = torch.stack([torch.stack(row) for row in coefficients])
    squares = ((deviations @ moments) * deviations).sum(1).clamp(min=0) / sums[0] ** 2
    # 1/c = 1 + Σw²/(Σw)² − 2Σw³/(Σw·Σw²) is the factor's inverse
    share = moments[0, 0] / sums[0] ** 2
    errors = (squares / (1 + share - 2 * cubes / (sums[0] * moments[0, 0]))).sqrt()
    return dict(zip(("signal_error", "noise_error", "noise_scale_error"), errors, strict=True))


def neighbour_correlation(values: Tensor) -> float:
    """Return the correlation of neighbouring rows: 0 ± 1/√n for n rows in random order, NaN if all rows are equal.

    >>> neighbour_correlation(torch.tensor([1.0, -1.0, 1.0, -1.0]))
    -0.75
    """
    # Σ_i (x_{i+1} − x̄)·(x_i − x̄) / Σ_i ‖x_i − x̄‖², x of shape (rows, elements of a row)
    centred = values.reshape(len(values), -1).double()
    centred = centred - centred.mean(0)
    return float((centred[1:] * centred[:-1]).sum() / centred.square().sum())


def strongest_correlation(batches: Iterable[Any]) -> tuple[float, int]:
    """Return the strongest correlation of neighbours in any tensor of the first rows, and the number of these rows."""
    batch_tensors: list[list[Tensor]] = []
    row_count = 0
    for batch in batches:
        count = rows(batch)
        dense = [tensor for tensor in tensors_of(batch) if tensor.layout is torch.strided and not tensor.is_complex()]
        batch_tensors.append([tensor for tensor in dense if tensor.ndim and len(tensor) == count])
        row_count += count
        if row_count >= ROWS_CHECKED:
            break
    columns = [
        column for column in zip(*batch_tensors, strict=False) if len({tensor.shape[1:] for tensor in column}) == 1
    ]
    correlations = [neighbour_correlation(torch.cat(column)[:ROWS_CHECKED]) for column in columns]
    finite = (correlation for correlation in correlations if not math.isnan(correlation))
    return max(finite, key=abs, default=0.0), min(row_count, ROWS_CHECKED)


@HookRegistry.register
class GradientNoiseScale(TrainingHook):
    """Estimate the gradient noise scale B = S/|G|² by splitting the batch at some steps.

    At each measured step the hook splits the batch into ``parts`` and computes the gradient of each part at the current
    weights, which costs about one more forward and backward pass of the batch. The squared norms at the two sizes give
    unbiased estimates of |G|² (signal) and S (noise). Single estimates scatter widely, so each of the two is averaged,
    and the noise scale is the ratio of the averages, never the average of ratios (arXiv 1812.06162).

    From the second measurement on, the scatter of the measurements gives standard errors (by the delta method for the
    ratio). They are too small with few measurements, if signal is below about five times signal_error, and if the
    gradients of rows have heavy tails: for rows of Student's t with 3 degrees of freedom, two errors cover noise in
    about 80 % and noise_scale in 85 %, since the rare rows that make up most of the noise are missing from most
    measurements. The measured coverage of intervals is at the end of this page. With the default ``decay`` the averages
    have an effective sample size of at most about 19. A drift of the true value counts as scatter.

    Assumes that the loss is a mean over rows, that the rows are independent draws, and that the weights move little
    over the averaged steps. In a sorted order rows are not exchangeable, and the metrics describe the batches of that
    order instead of the data. The hook issues a notice at the start if the correlation of neighbours among the first
    256 rows exceeds what chance explains (4/√256). Rows that are drawn without replacement from N rows give a |G|² that
    is smaller by S/N than the squared norm of the mean gradient of all N, so it may become negative once the training
    rows are fitted. BatchNorm normalises each part separately, so the estimate is then the noise of gradients at the
    size of a part. With dropout all parts use the same random stream, and the noise that their masks share counts as
    signal. The hook skips batches of one row.

    With several processes the batch consists of the rows of all ranks, and part i of the i-th part of each rank; each
    rank's mean has the same weight, as in the gradient of the step. The hook skips a step if the ranks have different
    numbers of parts, or fewer than two.

    Args:
        every_n_steps: steps between two measurements.
        parts: number of parts of a batch; more parts scatter a little less and cost more overhead. If the loop
            accumulates gradients, the parts are the micro-batches of the step.
        decay: weight of the past at each measurement: 0 keeps only the newest one, 1 is the mean of all, a value in
            between is an exponential average over about 1/(1 − decay) measurements with bias correction.
    """

    name = "gradient_noise_scale"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    needs_loss = True
    needs_loader = True
    needs_next_batch = True
    _sums = Remembered(partial(torch.zeros, 3, dtype=torch.float64))  # of 1, signal and noise, weighted
    _moments = Remembered(partial(torch.zeros, 3, 3, dtype=torch.float64))  # of their products, by the squared weights
    _cubes = Remembered(float)  # of the cubed weights
    metrics = """
        noise_scale | S / |G|², each averaged by itself over the measurements so far | (−∞, ∞), NaN
            | In rows. For SGD: doubling a batch far below it nearly halves the steps needed, doubling one far above it
            saves almost none. Adam, Muon and others divide by the size of gradients, so that their useful batch size
            may differ from it by a large factor; compare it between steps only. Usually grows during training.
            Negative: |G|² is lost in the noise; average longer.
        signal | |G|²: average of signal_estimate, the newest but k weighted by decay^k | (−∞, ∞)
            | Squared norm of the gradient without sampling noise. Near 0: the steps are a random walk.
        noise | S: average of noise_estimate, the newest but k weighted by decay^k | (−∞, ∞)
            | tr Σ, Σ the covariance of one row's gradient; a batch of B rows has the noise energy S/B.
        noise_scale_error | √(c·Σw²(S_i − B·|G|²_i)²) / (|G|²·Σw), w = decay^k, B = S/|G|² of the averages, c = 1 / (1 +
            Σw²/(Σw)² − 2Σw³/(Σw·Σw²)) | [0, ∞), NaN
            | Standard error of noise_scale (delta method); from the second measurement on.
        signal_error | √(c·Σw²(|G|²_i − |G|²)²) / Σw | [0, ∞)
            | Standard error of signal. Above a fifth of signal: noise_scale and its error are unreliable; average
            longer. Choose the number of measurements in advance: to stop once signal happens to be large selects too
            small noise scales.
        noise_error | √(c·Σw²(S_i − S)²) / Σw | [0, ∞) | Standard error of noise.
        signal_estimate | (B_big·|G_big|² − B_small·|G_small|²) / (B_big − B_small); G_big = Σ (b_i/B)·G_i, |G_small|² =
            Σ (b_i/B)·|G_i|², G_i the gradient on the b_i rows of part i | (−∞, ∞)
            | Unbiased; without any signal about half of all values are negative.
        noise_estimate | (|G_small|² − |G_big|²) / (1/B_small − 1/B_big) | [0, ∞)
            | Unbiased; the wider it scatters, the more averaging is needed.
        batch_rows | B, the rows of the step's batch | 2, 3, … | Compare with noise_scale.
    """

    def __init__(self, *, every_n_steps: int = 100, parts: int = 2, decay: float = 0.9) -> None:
        require(parts >= 2, f"gradient_noise_scale.parts is {parts}; it must be at least 2.")
        require(0 <= decay <= 1, f"gradient_noise_scale.decay is {decay}; it must be in 0..1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every_n_steps)
        self.parts, self.decay = parts, decay

    def start(self, run: RunInfo) -> None:
        """Issue a notice if the rows are not exchangeable, or if there will be no standard errors."""
        with preserved_loader(run.task.loader):
            correlation, row_count = strongest_correlation(run.task.loader.batches(0))
        if abs(correlation) * math.sqrt(row_count) > SIGNIFICANT:
            notice(
                f"gradient_noise_scale assumes that the rows of a batch are independent draws, but in strategy "
                f"{run.strategy!r} neighbours among the first {row_count} rows are "
                f"{'' if correlation > 0 else 'un'}alike (correlation {correlation:.2f}): its metrics describe the "
                "batches of this order, not the data."
            )
        if not self.decay or run.steps <= self.step_schedule.every_n_steps:
            notice(
                "gradient_noise_scale reports no standard errors: they need at least 2 measurements in one average "
                f"(every_n_steps below the {run.steps:,} steps of the run, and decay above 0)."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return this step's estimates, the averages and their errors; nothing for a batch that cannot be split."""
        parts, ranks = micro_batches(ctx.batch_data, self.parts), ctx.ranks
        ranks.join()
        rank_counts = ranks.gather([rows(part) for part in parts])
        if len(parts) < 2 or any(len(counts) != len(parts) for counts in rank_counts):
            return {}
        counts = [sum(part_counts) * ranks.size // len(rank_counts) for part_counts in zip(*rank_counts, strict=True)]
        # B_small = B/n for n parts, as in part_norms
        norms = part_norms(map(ctx.compute_batch_gradients, parts), counts)
        estimates = signal_and_noise(norms, sum(counts) / len(parts), sum(counts))
        newest = torch.stack([torch.ones_like(estimates[0]), *estimates])
        # With u = (1, |G|², S) of each measurement, k measurements ago: Σ decay^k·u, Σ decay^(2k)·uuᵀ, Σ decay^(3k).
        self._sums = self.decay * self._sums.to(newest.device) + newest
        self._moments = self.decay**2 * self._moments.to(newest.device) + torch.outer(newest, newest)
        has_errors = self._cubes * self.decay > 0
        self._cubes = self.decay**3 * self._cubes + 1
        signal, noise = (self._sums / self._sums[0])[1:].unbind()
        errors = standard_errors(self._sums, self._moments, self._cubes) if has_errors else {}
        return errors | {
            "noise_scale": noise / signal,
            "signal": signal,
            "noise": noise,
            "signal_estimate": estimates[0],
            "noise_estimate": estimates[1],
            "batch_rows": sum(counts),
        }
