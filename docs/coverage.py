"""Measured coverage of the intervals that hooks state: ``python -m docs.coverage`` writes docs/coverage.json.

Each row is the share of simulations in which estimate ± factor·error contains the true value. The pages of the hooks
include them (docs/generate.py).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loopscope.student_t import critical_t
from loopscope.training_hooks.circuits.attention_scores import RowStatistics, sampling_error
from loopscope.training_hooks.circuits.fourier import GROUPS
from loopscope.training_hooks.circuits.modular_addition import ablated_losses, rows_of_pairs
from loopscope.training_hooks.counterfactual import CounterfactualValidator
from loopscope.training_hooks.counterfactual.counterfactual import ordering_split, split_errors
from loopscope.training_hooks.counterfactual.splits import splits
from loopscope.training_hooks.curvature.lanczos import Density, KnownPairs, lanczos, mean_and_error, rademacher
from loopscope.training_hooks.curvature.sharpness import density_metrics
from loopscope.training_hooks.gradients.gradient_history import count_sketch
from loopscope.training_hooks.gradients.gradient_noise_scale import signal_and_noise, standard_errors
from torch import Tensor

TABLE = Path(__file__).with_name("coverage.json")
TRIALS = 500
Row = tuple[str, str, str, float]
"""Metric, setting, interval, and share of the intervals that contain the true value."""
DENSITY_INTERVAL = "± 12.7 errors (2 density probes), where the density is above 1 % of its peak"
Hits = dict[str, list[bool]]
HEAVY = ((30, 1.0, ", heavy-tailed rows"), (60, 0.9, ", heavy-tailed rows"))


def shares(hits: Hits, setting: str, interval: str) -> list[Row]:
    """Return a row for each metric from its hits."""
    return [(metric, setting, interval, sum(found) / len(found)) for metric, found in hits.items()]


def sharpness(trials: int) -> list[Row]:
    """Simulate spectra of 120 eigenvalues, with the default numbers of probes and iterations."""
    size, generator = 120, torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    one = torch.zeros(size).index_fill(0, torch.tensor([0]), 1.0)
    spectra = {
        "one eigenvalue": one,
        "one eigenvalue above many small ones": one + 0.01 * torch.rand(size, generator=generator),
        "ten eigenvalues": torch.cat([torch.linspace(1, 2, 10), torch.zeros(size - 10)]),
        "two equal eigenvalues": one + one.roll(1),
        "evenly spaced, both signs": torch.linspace(-1, 1, size),
    }
    rows: list[Row] = []
    for number, (setting, spectrum) in enumerate(spectra.items()):
        generator = torch.Generator().manual_seed(number)
        values = spectrum.double()
        square = values.square().sum()
        truth = {
            "trace": values.sum(),
            "eigenvalue_rms": (square / size).sqrt(),
            "effective_directions": values.abs().sum().square() / square,
            "negative_energy": values.clamp(max=0).square().sum() / square,
        }
        hits: Hits = {metric: [] for metric in [*truth, "density"]}
        density = Density(values, torch.full_like(values, 1 / size))
        matrix = (basis * values) @ basis.T
        for _ in range(trials):  # in each one the probes and the iterations of the default options
            probes = rademacher(size, 6, generator, matrix)
            runs = [lanczos(matrix.mv, probe, 16 if place < 2 else 1) for place, probe in enumerate(probes)]
            known = KnownPairs.of(runs[:2])
            samples = known.deflated_trace(size * torch.stack([run.diagonal[0] for run in runs]), probes)
            found: dict[str, Any] = dict(zip(("trace", "trace_error"), mean_and_error(samples), strict=True))
            found |= density_metrics(runs[:2], 32, known)
            for metric, true in truth.items():
                factor = critical_t(5 if metric == "trace" else 1, 0.95)
                width = factor * float(found[f"{metric}_error"]) + 1e-9 * float(true.abs() + 1)
                hits[metric].append(abs(float(found[metric] - true)) <= width)
            smoothed = density.smoothed(torch.stack(found["density_grid"]))
            widths = critical_t(1, 0.95) * torch.stack(found["density_error"]) + 1e-9 * (smoothed + 1)
            is_hit = (torch.stack(found["density"]) - smoothed).abs() <= widths
            hits["density"] += is_hit[smoothed > 0.01 * smoothed.max()].tolist()
        rows += shares({"trace": hits.pop("trace")}, setting, "± 2.57 errors (6 probes)")
        in_density = hits.pop("density")
        rows += shares(hits, setting, "± 12.7 errors (2 density probes)")
        rows += shares({"density": in_density}, setting, DENSITY_INTERVAL)
    return rows


def batch_dynamics(trials: int) -> list[Row]:
    """Simulate sketches of pairs of gradients with given cosines, of Gaussian elements or with heavy tails."""
    generator, size, dimensions = torch.Generator().manual_seed(0), 20_000, 1024
    rows: list[Row] = []
    for name in ("Gaussian", "heavy tails"):
        for cosine in (0.0, 0.5, 0.95):
            hits: Hits = {"cosine": [], "norm": []}
            for _ in range(trials):
                one, other = torch.randn(2, size, generator=generator, dtype=torch.float64)
                if name == "heavy tails":
                    one, other = one * one.abs().exp(), other * other.abs().exp()
                one = one / one.norm()
                other = other - (other @ one) * one
                other = cosine * one + math.sqrt(1 - cosine**2) * other / other.norm()
                sketches = torch.stack([count_sketch(vector.float(), dimensions) for vector in (one, other)]).double()
                norms = sketches.norm(dim=1)
                found = float(sketches[0] @ sketches[1] / norms.prod())
                hits["cosine"].append(abs(found - cosine) <= 2 * (1 - cosine**2) / math.sqrt(dimensions))
                hits["norm"].append(abs(float(norms[0]) - 1) <= 2 / math.sqrt(2 * dimensions))
            rows += shares(hits, f"projection = {dimensions}, cosine {cosine:g}, {name}", "± 2 stated errors")
    return rows


def gradient_noise_scale(trials: int) -> list[Row]:
    """Simulate gradients of rows, with |G|² = 1 and S = 32 in 50 dimensions, and batches of 32 rows.

    They are Gaussian, or of a multivariate Student's t with 3 degrees of freedom, whose fourth moment is infinite.
    """
    generator, dimensions, rows_in_part, noise = torch.Generator().manual_seed(0), 50, 16, 32.0
    rows: list[Row] = []
    for count, decay, tails in (*((*item, "") for item in ((5, 1.0), (10, 1.0), (30, 1.0), (60, 0.9))), *HEAVY):
        if tails:
            drawn = torch.randn(trials, count, 2, rows_in_part, dimensions, generator=generator, dtype=torch.float64)
            squares = torch.randn(trials, count, 2, rows_in_part, 3, generator=generator, dtype=torch.float64).square()
            drawn = (drawn / squares.sum(-1, keepdim=True).sqrt()).mean(3) * math.sqrt(rows_in_part)
        else:
            drawn = torch.randn(trials, count, 2, dimensions, generator=generator, dtype=torch.float64)
        parts = drawn * math.sqrt(noise / dimensions / rows_in_part) + dimensions**-0.5
        norms = parts.square().sum(-1).mean(-1), parts.mean(2).square().sum(-1)
        measured = torch.stack([torch.ones(trials, count).double(), *signal_and_noise(norms, 16, 32)], -1)
        weights = decay ** torch.arange(count - 1, -1, -1, dtype=torch.float64)
        hits: Hits = {"signal": [], "noise": [], "noise_scale": []}
        for trial in measured:
            sums = weights @ trial
            moments = (weights[:, None] * trial).T @ (weights[:, None] * trial)
            errors = standard_errors(sums, moments, float(weights.pow(3).sum()))
            found = {"signal": sums[1] / sums[0], "noise": sums[2] / sums[0], "noise_scale": sums[2] / sums[1]}
            for (metric, value), true in zip(found.items(), (1.0, noise, noise), strict=True):
                hits[metric].append(bool((value - true).abs() <= 2 * errors[f"{metric}_error"]))
        rows += shares(hits, f"{count} measurements, decay {decay:g}{tails}", "± 2 errors")
    return rows


@dataclass(frozen=True)
class Epochs:
    """Gradients of epochs in 300 dimensions: a signal of energy 1, and independent Gaussian noise."""

    count: int
    """The number of shuffled epochs."""
    noise: float
    """The energy of the noise of each epoch."""
    effect: float
    """The energy that the order adds to the gradient of the observed epoch, orthogonal to the signal."""

    def draw(self, trials: int, generator: torch.Generator) -> Tensor:
        """Return gradients of trials, shape (trials, 1 + count, 300), the observed epoch first."""
        drawn = torch.randn(trials, self.count + 1, 300, generator=generator, dtype=torch.float64)
        signal = torch.full((300,), 300**-0.5, dtype=torch.float64)
        order = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(150) * math.sqrt(self.effect / 300)
        vectors = drawn * math.sqrt(self.noise / 300) + signal
        vectors[:, 0] += order
        return vectors

    def expectations(self, trials: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean gradients of sets of shuffles, the expected null_fraction, and the expected excess.

        They are measured on independent epochs, ``trials`` of them.
        """
        vectors = self.draw(trials, torch.Generator().manual_seed(1))
        shuffles = torch.arange(1, self.count + 1)[None]
        found = [splits(gram, torch.zeros(1, dtype=torch.long), shuffles) for gram in vectors @ vectors.mT]
        nulls, excesses = (torch.cat([getattr(one, name) for one in found]) for name in ("null_fraction", "excess"))
        return vectors[:, 1:].mean(1), nulls.mean(), excesses.mean() if self.effect else torch.zeros(())

    def __str__(self) -> str:
        order = f", effect of the order {self.effect:g} times" if self.effect else ""
        return f"noise of {self.noise:g} times the signal's energy{order}"


def ordering_fraction(observed: Tensor, means: Tensor) -> Tensor:
    """Return the mean of 1 − max(0, cos(g, c̄))² over mean gradients c̄ of sets of shuffles, for an observed g."""
    energies = means.square().sum(1) * observed.square().sum()
    return (1 - (means @ observed).clamp(min=0).square() / energies).mean()


def counterfactual(trials: int) -> list[Row]:
    """Simulate epochs whose order has no effect, so that the true excess is 0, or an effect.

    The true ordering_fraction is the expectation over the shuffles for the observed epoch of the simulation.
    """
    rows: list[Row] = []
    for count, noise, effect in (
        (3, 1.0, 0.0),
        (3, 10.0, 0.0),
        (5, 1.0, 0.0),
        (8, 3.0, 0.0),
        (3, 1.0, 0.5),
        (8, 3.0, 0.5),
    ):
        epochs = Epochs(count, noise, effect)
        means, null, excess = epochs.expectations(4 * trials)
        hits: Hits = {"excess": [], "ordering_fraction": [], "null_fraction": []}
        for vectors in epochs.draw(trials, torch.Generator().manual_seed(0)):
            gram = vectors @ vectors.T
            found, errors = ordering_split(gram), split_errors(gram)
            hits["excess"].append(bool((found["excess"] - excess).abs() <= errors["excess_half_width"]))
            for metric, true in (("ordering_fraction", ordering_fraction(vectors[0], means)), ("null_fraction", null)):
                width = critical_t(count - 1, 0.95) * errors[f"{metric}_error"]
                hits[metric].append(bool((found[metric] - true).abs() <= width))
        setting = f"k = {count}, {epochs}"
        rows += shares({"excess": hits.pop("excess")}, setting, "± excess_half_width")
        rows += shares(hits, setting, f"± {critical_t(count - 1, 0.95):.2f} errors")
    return rows


def counterfactual_validator(trials: int) -> list[Row]:
    """Simulate epochs as for ``counterfactual``, with the default of 8 shuffles, and sets of 3, 5 and 8 of them."""
    hook, sizes = CounterfactualValidator(), (3, 5, 8)
    rows: list[Row] = []
    for noise, effect in ((1.0, 0.0), (10.0, 0.0), (1.0, 0.5)):
        truths = {size: Epochs(size, noise, effect).expectations(4 * trials) for size in sizes}
        hits: dict[int, Hits] = {size: {"excess": [], "ordering_fraction": [], "null_fraction": []} for size in sizes}
        epochs = Epochs(hook.k_max, noise, effect)
        for vectors in epochs.draw(trials, torch.Generator().manual_seed(0)):
            found: Any = hook.estimate(vectors @ vectors.T)
            for size, (means, null, excess) in truths.items():
                factor, key = critical_t(size - 1, 0.95), str(size)
                expected = {"ordering_fraction": ordering_fraction(vectors[0], means), "null_fraction": null}
                for metric, true in (expected | {"excess": excess}).items():
                    width = factor * found[f"{metric}_error"][key]
                    hits[size][metric].append(bool((found[metric][key] - true).abs() <= width))
        for size in sizes:
            setting, errors = f"K = {size} of 8, {epochs}", f"± {critical_t(size - 1, 0.95):.2f} errors"
            interval = "excess_low to excess_high" if size == hook.k_max else "± excess_half_width"
            rows += shares({"excess": hits[size].pop("excess")}, setting, interval)
            rows += shares(hits[size], setting, errors)
    return rows


def fourier(trials: int) -> list[Row]:
    """Simulate the choice of rows for logits with waves in a + b, in a − b and in b alone, and noise.

    The groups of rows are those of the hook; the true values are the losses on all pairs.
    """
    rows: list[Row] = []
    for p, count in ((17, 6), (29, 16), (41, 32)):
        generator = torch.Generator().manual_seed(p)
        pairs = rows_of_pairs(torch.arange(p), p)
        (a, b), c = pairs.T[:, :, None], torch.arange(p)
        turns = ((2.0, a + b - c), (1.5, a - b - c), (1.0, b - 2 * c))
        logits = torch.stack([height * torch.cos(4 * math.pi * turn.double() / p) for height, turn in turns]).sum(0)
        logits += torch.randn(p * p, p, generator=generator, dtype=torch.float64) / 2
        trained, frequencies = pairs[torch.randperm(p * p, generator=generator)[: p * p // 3]], torch.tensor([2])
        truth = ablated_losses(partial(iter, [(pairs, logits)]), p, frequencies, trained)
        hits: Hits = {metric: [] for metric in truth}
        factor = critical_t(min(GROUPS, count) - 1, 0.95)
        for _ in range(trials):
            drawn = torch.randperm(p, generator=generator)[:count]
            groups = [drawn[first::GROUPS] for first in range(min(GROUPS, count))]
            pieces = [(rows_of_pairs(group, p), logits.view(p, p, p)[group].flatten(0, 1)) for group in groups]
            found = ablated_losses(partial(iter, pieces), p, frequencies, trained, groups)
            for metric, true in truth.items():
                value = found[metric] - found.get(f"{metric}_bias", 0)
                hits[metric].append(bool((value - true).abs() <= factor * found[f"{metric}_error"]))
        for metric, found_hits in hits.items():
            interval = f"± {factor:.2f} errors" if metric.startswith("full") else f"− bias ± {factor:.2f} errors"
            rows += shares({metric: found_hits}, f"{count} of {p} rows", interval)
    return rows


def attention(trials: int) -> list[Row]:
    """Simulate entropies of samples, Gaussian or skewed, whose mean is known.

    Samples of different lengths have 4 heads, whose entropies are correlated.
    """
    generator = torch.Generator().manual_seed(0)
    draws: dict[str, Callable[[int], Tensor]] = {
        "Gaussian": lambda count: 1 + 0.2 * torch.randn(count, generator=generator, dtype=torch.float64),
        "skewed (exponential)": lambda count: -torch.rand(count, generator=generator, dtype=torch.float64).log(),
    }
    rows: list[Row] = []
    for name, draw in draws.items():
        for count in (8, 32, 128):
            hits: Hits = {"entropy": []}
            for _ in range(trials):
                values = draw(count)
                error = sampling_error((values - values.mean()) / count)
                hits["entropy"].append(bool((values.mean() - 1).abs() <= 2 * error))
            rows += shares(hits, f"{count} samples, {name}", "± 2 errors")
    for count in (8, 32):
        hits = {"entropy": [], "normalised_entropy": [], "mean_entropy": []}
        for _ in range(trials):
            lengths = torch.randint(4, 33, (count, 1), generator=generator).double().expand(count, 4)
            values = 1 + 0.2 * (torch.randn(count, 1, generator=generator) + torch.randn(count, 4, generator=generator))
            shares_of_most = torch.rand(count, 4, generator=generator)
            table = [values * lengths, lengths, shares_of_most * lengths, lengths]
            found = RowStatistics(torch.stack([*table, torch.zeros_like(lengths), torch.zeros_like(lengths)]))
            influence, normalised = found.influence(), found.influence(normalised=True)
            estimates = {
                "entropy": (found.entropy[0] - 1, influence[:, 0]),
                "normalised_entropy": (found.normalised_entropy[0] - 0.5, normalised[:, 0]),
                "mean_entropy": (found.entropy.mean() - 1, influence.mean(dim=1)),
            }
            for metric, (deviation, effects) in estimates.items():
                hits[metric].append(bool(deviation.abs() <= 2 * sampling_error(effects)))
        rows += shares(hits, f"{count} samples of 4 to 32 rows", "± 2 errors")
    return rows


SIMULATIONS: Sequence[Callable[[int], list[Row]]] = (
    sharpness,
    batch_dynamics,
    gradient_noise_scale,
    counterfactual,
    counterfactual_validator,
    attention,
    fourier,
)


def measured(trials: int = TRIALS) -> dict[str, Any]:
    """Simulate all intervals; returns the rows by hook."""
    return {"trials": trials, "hooks": {simulate.__name__: simulate(trials) for simulate in SIMULATIONS}}


def section(hook: str) -> list[str]:
    """Return the lines of a hook's page about its intervals; none if the hook states no error."""
    stored = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = stored["hooks"].get(hook, [])
    if not rows:
        return []
    lines = [f"| `{metric}` | {setting} | {interval} | {share:.1%} |" for metric, setting, interval, share in rows]
    sentence = (
        f"Share of {stored['trials']} simulations in which the interval contains the true value "
        "(`python -m docs.coverage`):"
    )
    heading = ["| metric | setting | interval | coverage |", "| --- | --- | --- | --- |"]
    return ["## Measured coverage", "", sentence, "", *heading, *lines, ""]


def main() -> None:
    """Write the table."""
    TABLE.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
