"""The gradient noise scale: how many samples a batch needs before its gradient is more signal than noise."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.data import held, micro_batches, rows
from loopscope.errors import require
from loopscope.hooks import Metrics, RunInfo
from loopscope.state import Vector, accumulate, dot, tensors_of
from torch import Tensor

from ..measures import notice

ROWS_SEEN = 256  # rows whose order is looked at before the run
NO_CHANCE = 4.0  # standard errors beyond which neighbouring rows are alike, or unlike, for another reason than chance


def signal_and_noise(norms: tuple[Tensor, Tensor], small: float, big: float) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of |G|², G the true gradient, and of S = tr Σ, Σ the covariance of a row's gradient.

    ``norms`` are |G|² of gradients on a ``small`` and on a ``big`` number of rows, zero-dimensional. From
    E|G_B|² = |G|² + S/B at these two, |G|² = (B_big|G_big|² − B_small|G_small|²)/(B_big − B_small) and
    S = (|G_small|² − |G_big|²)/(1/B_small − 1/B_big) (arXiv 1812.06162, appendix A.1). The first can be negative.
    """
    of_small, of_big = norms
    signal = (big * of_big - small * of_small) / (big - small)
    noise = (of_small - of_big) / (1 / small - 1 / big)
    return signal, noise


def part_norms(gradients: Iterable[Vector], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return |G_small|² and |G_big|² from the mean gradients of parts of a batch, ``counts`` their numbers of rows.

    G_big is the mean of the parts' gradients weighted by rows, |G_small|² the mean of their squared norms weighted the
    same. With b_i of B rows in part i, E|G_small|² = |G|² + S·Σ(b_i/B)/b_i = |G|² + S·n/B, so that B_small = B/n holds
    exactly, however uneven the n parts are. Both are zero-dimensional, float64; only the gradients' sum is held.
    """
    total: dict[str, Tensor] = {}
    squares = []
    for gradient, count in zip(gradients, counts, strict=True):
        total = accumulate(total, gradient, count)
        squares.append(count * dot(gradient, gradient).double())
        del gradient  # before the next one is made
    return torch.stack(squares).sum() / sum(counts), dot(total, total).double() / sum(counts) ** 2


def standard_errors(sums: Tensor, moments: Tensor, cubes: float) -> dict[str, Tensor]:
    """Return the standard errors of the means of |G|² and S over measurements, and of their ratio, by metric.

    The measurements are u = (1, |G|², S) with weights w: ``sums`` is Σwu, shape (3,), ``moments`` Σw²uuᵀ, shape (3, 3),
    ``cubes`` Σw³. Where they are independent, a mean m has the squared error Σw²(x − m)²/(Σw)², here times a factor
    that makes it unbiased if all scatter alike (n/(n − 1) for n equal weights). The ratio B = S/|G|² of the means has,
    to first order, the error of the mean of (S − B·|G|²)/|G|² (delta method).
    """
    _, signal, noise = sums / sums[0]
    zero, one = torch.zeros_like(signal), torch.ones_like(signal)
    rows_of = [(-signal, one, zero), (-noise, zero, one), (zero, -noise / signal / signal, one / signal)]
    deviations = torch.stack([torch.stack(row) for row in rows_of])
    squares = ((deviations @ moments) * deviations).sum(1).clamp(min=0) / sums[0] ** 2
    share = moments[0, 0] / sums[0] ** 2
    errors = (squares / (1 + share - 2 * cubes / (sums[0] * moments[0, 0]))).sqrt()
    return dict(zip(("signal_error", "noise_error", "noise_scale_error"), errors, strict=True))


def likeness(values: Tensor) -> float:
    """Return the correlation of neighbouring rows: 0 ± 1/√n for n rows in random order, NaN if all rows are equal.

    >>> likeness(torch.tensor([1.0, -1.0, 1.0, -1.0]))
    -0.75
    """
    aside = values.reshape(len(values), -1).double()
    aside = aside - aside.mean(0)
    return float((aside[1:] * aside[:-1]).sum() / aside.square().sum())


def order_shown(batches: Iterable[Any]) -> tuple[float, int]:
    """Return the likeness that is largest in size among the tensors of the first rows, and how many rows these are."""
    taken: list[list[Tensor]] = []
    seen = 0
    for batch in batches:
        count = rows(batch)
        plain = [each for each in tensors_of(batch) if each.layout is torch.strided and not each.is_complex()]
        taken.append([each for each in plain if each.ndim and len(each) == count])
        seen += count
        if seen >= ROWS_SEEN:
            break
    columns = [column for column in zip(*taken, strict=False) if len({each.shape[1:] for each in column}) == 1]
    found = [likeness(torch.cat(column)[:ROWS_SEEN]) for column in columns]
    return max((each for each in found if not math.isnan(each)), key=abs, default=0.0), min(seen, ROWS_SEEN)


@HookRegistry.register
class GradientNoiseScale(TrainingHook):
    """Estimate the gradient noise scale B = S/|G|² by splitting the batch at some steps.

    The batch is split into ``parts``, and the gradient of each taken anew at the present weights: about one more
    forward and backward pass of the batch at each step where the hook fires. The squared norms at the two sizes give
    unbiased estimates of |G|² (signal) and S (noise). Single ones scatter widely, so each is averaged by itself, and
    the noise scale is the ratio of the averages, never the average of ratios (arXiv 1812.06162).

    Errors come from the scatter of the measurements, from the second on. They are standard errors, the ratio's by the
    delta method: of use where signal is at least five times signal_error. Two of them to each side hold the truth at
    94 % of the time with 30 measurements of equal weight (``decay`` 1), 88 % with 5; with the default ``decay``, whose
    averages never rest on more than about 19, at 92 %. A drift of the truth itself counts as scatter.

    Assumes that the loss is a mean over rows, that the rows are independent draws, and that the weights move little
    over the steps that are averaged. In a sorted order rows are not exchangeable, and the numbers tell of its batches,
    not of the data: a note at the start says so where neighbours among the first 256 rows are more alike, or less, than
    chance explains (correlation beyond 4/√256). Rows that are drawn without replacement from N give a |G|² that is
    smaller by S/N than the squared norm of the mean gradient of all N: it may fall below zero when the training rows
    are fitted. BatchNorm normalises each part by itself: what is estimated is then the noise of gradients at the size
    of a part. With dropout all parts draw from the same random stream, and the noise that their masks have in common
    counts as signal. A batch of one row is left out.

    Over several processes the batch is that of all ranks, and part i is made of the i-th part of each rank's rows, each
    rank's mean counting alike, as in its gradients. A step in which ranks have different numbers of parts, or fewer
    than two, is left out.

    Args:
        every_n_steps: measure one step in so many.
        parts: into how many parts a batch is split; more parts scatter a little less and cost more overhead.
        decay: weight of the past at each measurement: 0 keeps the newest only, 1 is the mean over all of them, anything
            between an exponential average over about 1/(1 − decay) measurements, corrected for its beginning.
    """

    name = "gradient_noise_scale"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    needs_loss = True
    needs_loader = True
    needs_next_batch = True
    _sums = Remembered(lambda: torch.zeros(3, dtype=torch.float64))  # of 1, signal and noise, weighted
    _moments = Remembered(lambda: torch.zeros(3, 3, dtype=torch.float64))  # of their products, by the squared weights
    _cubes = Remembered(float)  # of the cubed weights
    metrics = """
        noise_scale | S / |G|², each averaged by itself over the measurements so far | (−∞, ∞)
            | In rows. Batches far below it: doubling them nearly halves the steps needed; far above: it saves almost
            none. Usually grows in training. Negative: |G|² is lost in the noise, average longer.
        signal | |G|²: average of signal_estimate, the newest but k weighted by decay^k | (−∞, ∞)
            | Squared norm of the gradient without sampling noise; near 0: the steps are a random walk.
        noise | S: average of noise_estimate, the newest but k weighted by decay^k | (−∞, ∞)
            | tr Σ, Σ the covariance of one row's gradient; a batch of B rows has the noise energy S/B.
        noise_scale_error | √(c·Σw²(S_i − B·|G|²_i)²) / (|G|²·Σw), w = decay^k, B = S/|G|² of the averages, c = 1 / (1 +
            Σw²/(Σw)² − 2Σw³/(Σw·Σw²)) | [0, ∞)
            | Standard error of noise_scale (delta method); from the second measurement on.
        signal_error | √(c·Σw²(|G|²_i − |G|²)²) / Σw | [0, ∞)
            | Standard error of signal. Above a fifth of it: noise_scale and its error are unreliable; average longer.
        noise_error | √(c·Σw²(S_i − S)²) / Σw | [0, ∞) | Standard error of noise.
        signal_estimate | (B_big·|G_big|² − B_small·|G_small|²) / (B_big − B_small); G_big = Σ (b_i/B)·G_i, |G_small|² =
            Σ (b_i/B)·|G_i|², G_i the gradient on the b_i rows of part i | (−∞, ∞)
            | Unbiased; about half of all values are negative where there is no signal.
        noise_estimate | (|G_small|² − |G_big|²) / (1/B_small − 1/B_big) | [0, ∞)
            | Unbiased; how widely it scatters tells how much averaging is needed.
        batch_rows | B, the rows of the step's batch | 2, 3, … | To be held against noise_scale.
    """

    def __init__(self, *, every_n_steps: int = 100, parts: int = 2, decay: float = 0.9) -> None:
        require(parts >= 2, f"gradient_noise_scale.parts is {parts}; two sizes of batch need at least 2.")
        require(0 <= decay <= 1, f"gradient_noise_scale.decay is {decay}; it must lie in 0..1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every_n_steps)
        self.parts, self.decay = parts, decay

    def start(self, run: RunInfo) -> None:
        """Say where rows are not exchangeable, and where there will be no error."""
        with held(run.task.loader):
            like, seen = order_shown(run.task.loader.batches(0))
        if abs(like) * math.sqrt(seen) > NO_CHANCE:
            notice(
                f"gradient_noise_scale takes the rows of a batch for independent draws, but in strategy "
                f"{run.strategy!r} neighbours among the first {seen} rows are {'' if like > 0 else 'un'}alike "
                f"(correlation {like:.2f}): its numbers tell of the batches of this order, not of the data."
            )
        if not self.decay or run.steps <= self.step_schedule.every_n_steps:
            notice(
                "gradient_noise_scale gives no standard errors: they need at least 2 measurements in one average "
                f"(every_n_steps below the {run.steps:,} steps of the run, and decay above 0)."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return this step's estimates, the averages and their errors; nothing for a batch without parts."""
        parts, ranks = micro_batches(ctx.batch_data, self.parts), ctx.ranks
        ranks.join()
        of_ranks = ranks.gather([rows(part) for part in parts])
        if len(parts) < 2 or any(len(each) != len(parts) for each in of_ranks):
            return {}
        counts = [sum(of_part) * ranks.size // len(of_ranks) for of_part in zip(*of_ranks, strict=True)]
        norms = part_norms(map(ctx.compute_batch_gradients, parts), counts)
        estimates = signal_and_noise(norms, sum(counts) / len(parts), sum(counts))
        newest = torch.stack([torch.ones_like(estimates[0]), *estimates])
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
