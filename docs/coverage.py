"""Measured coverage of the intervals that hooks state: ``python -m docs.coverage`` writes docs/coverage.json.

Each row is the share of simulations in which estimate ± factor·error contains the true value. The pages of the hooks
include them (docs/generate.py).
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from loopscope.student_t import critical_t
from loopscope.training_hooks.circuits.attention_scores import sampling_error
from loopscope.training_hooks.counterfactual.counterfactual import ordering_split, split_errors
from loopscope.training_hooks.curvature.lanczos import KnownPairs, lanczos, mean_and_error, rademacher
from loopscope.training_hooks.curvature.sharpness import density_metrics
from loopscope.training_hooks.gradients.gradient_noise_scale import signal_and_noise, standard_errors
from torch import Tensor

TABLE = Path(__file__).with_name("coverage.json")
TRIALS = 500
Row = tuple[str, str, str, float]
"""Metric, setting, interval, and share of the intervals that contain the true value."""
Hits = dict[str, list[bool]]


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
        hits: Hits = {metric: [] for metric in truth}
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
        rows += shares({"trace": hits.pop("trace")}, setting, "± 2.57 errors (6 probes)")
        rows += shares(hits, setting, "± 12.7 errors (2 density probes)")
    return rows


def gradient_noise_scale(trials: int) -> list[Row]:
    """Simulate Gaussian gradients of rows, with |G|² = 1 and S = 32 in 50 dimensions, and batches of 32 rows."""
    generator, dimensions, rows_in_part, noise = torch.Generator().manual_seed(0), 50, 16, 32.0
    rows: list[Row] = []
    for count, decay in ((5, 1.0), (10, 1.0), (30, 1.0), (60, 0.9)):
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
        rows += shares(hits, f"{count} measurements, decay {decay:g}", "± 2 errors")
    return rows


def counterfactual(trials: int) -> list[Row]:
    """Simulate epochs whose order has no effect, in 300 dimensions, so that the true excess is 0."""
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for count, ratio in ((3, 1.0), (3, 10.0), (5, 1.0), (8, 3.0)):
        hits: Hits = {"excess": []}
        for _ in range(trials):
            noise = torch.randn(count + 1, 300, generator=generator, dtype=torch.float64) * math.sqrt(ratio / 300)
            vectors = noise + 300**-0.5
            gram = vectors @ vectors.T
            width = split_errors(gram)["excess_half_width"]
            hits["excess"].append(bool(ordering_split(gram)["excess"].abs() <= width))
        rows += shares(hits, f"k = {count}, noise of {ratio:g} times the signal's energy", "± excess_half_width")
    return rows


def attention(trials: int) -> list[Row]:
    """Simulate entropies of samples, Gaussian or skewed, whose mean is known."""
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
    return rows


SIMULATIONS: Sequence[Callable[[int], list[Row]]] = (sharpness, gradient_noise_scale, counterfactual, attention)


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
