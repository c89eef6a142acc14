"""Detectors of NaN and infinite values, and of gradients that a loss scaler cannot save."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...errors import listed
from .. import Detector, Evidence, Finding, History, Threshold


class NonFinite(Detector):
    """Reports the first NaN or infinite value, with its producer and rows.

    Symptom: The loss is NaN

    The hook first_nonfinite names the module, the gradient, the row of the data or the optimizer that made the
    first NaN or infinite value. Usual causes are a learning rate that is too high, a division by zero or a root of
    zero, invalid data, and float16.

    Source: IEEE 754: NaN in one element spreads to all weights within one step
    """

    name = "nonfinite"
    stage = "nonfinite"
    needs = ("first_nonfinite",)

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding from the alert of first_nonfinite, or from a non-finite loss or weight."""
        alerts = history.alerts_of("first_nonfinite")
        targets = history.curve("training_checks/nonfinite_target_fraction")
        bad_step, first_step = targets.first_step_where(targets.values > 0), _first_step(history)
        if bad_step is not None and (first_step is None or bad_step <= first_step):
            share = targets.at(bad_step)
            yield self.finding(
                "critical",
                bad_step,
                f"{share:.1%} of the targets of the loss of step {bad_step:,} are NaN or infinite, so that the loss "
                "is, too.",
                "Look at what computes the targets: a logarithm or root of a negative number, a division by 0, or "
                "invalid rows; assert torch.isfinite(targets).all() before the loss.",
                Evidence("training_checks/nonfinite_target_fraction", share, 0.0, "0"),
                confidence=0.97,
            )
        elif alerts:
            alert = alerts[0]
            in_gradient = _begins_in_gradient(history, alert)
            yield self.finding(
                "critical",
                int(alert["step"] or 0),
                _sentence(alert) + IN_GRADIENT * in_gradient,
                SMALL_CONSTANT if in_gradient else _remedy(alert["sentence"]),
                Evidence("first_nonfinite/step", alert["step"], None, "no such step"),
                confidence=0.95,
            )
        elif first_step is not None:
            why = f"The loss is not finite from step {first_step:,} on, so all weights become NaN."
            remedy = "Repeat the run with the hook first_nonfinite, which names the producer."
            evidence = Evidence("training_checks/loss", "NaN", None, "a finite number")
            yield self.finding("critical", first_step, why, remedy, evidence)


SMALL_CONSTANT = "Add a small constant before roots, norms and divisions there: torch.sqrt(x + 1e-12)."
IN_GRADIENT = (
    " The loss of the step is finite, so the backward pass makes the first one, between the outputs and the loss: the "
    "derivative of a root or norm of 0 is infinite, as for the distance of two equal rows."
)


def _begins_in_gradient(history: History, alert: dict[str, Any]) -> bool:
    """Return whether a finite loss has non-finite gradients in all parameters, at a step that was not repeated."""
    step = int(alert["step"] or 0)
    loss = history.loss.between(step, step)
    count = history.curve("first_nonfinite/nonfinite_gradients").at(step)
    is_unknown = "have a non-finite gradient" in alert["sentence"]
    return is_unknown and len(loss) > 0 and bool(np.isfinite(loss).all()) and count == history.facts.get("trainable")


def _sentence(alert: dict[str, Any]) -> str:
    rows = alert.get("rows") or []
    known = f" Rows of the batch: {listed(rows, 5)}." if 0 < len(rows) <= 64 and "row" not in alert["sentence"] else ""
    return f"{alert['sentence']}{known}"


def _remedy(sentence: str) -> str:
    """Return what to do about the producer that a sentence of first_nonfinite names."""
    if "optimizer wrote" in sentence:
        return "Raise the optimizer's eps (to 1e-8, or 1e-4 in float16), lower the learning rate, keep float32 weights."
    if "batch of step" in sentence or "input of the model" in sentence:
        return "Clean these rows of the data; assert torch.isfinite(batch).all() in the loader."
    if "initial weights" in sentence:
        return "Repair the initialisation: uninitialised memory (torch.empty) or a division by zero."
    if "backward pass through" in sentence:
        return SMALL_CONSTANT
    if sentence.startswith("The loss of step"):  # names no producer
        return (
            "Lower the learning rate if the loss grew before; torch.autograd.detect_anomaly() shows where NaN begins."
        )
    return (
        "Look at the named place; torch.autograd.detect_anomaly() shows its line. Lower the learning rate if it grew."
    )


def _first_step(history: History) -> int | None:
    curves = (history.curve("training_checks/loss"), history.curve("training_metrics/loss"))
    steps = [curve.first_nonfinite for curve in curves if curve.first_nonfinite is not None]
    return min(steps, default=None)


class SkippedSteps(Detector):
    """Finds a loss scaler that skips most steps.

    Symptom: The loss does not fall with float16

    The loss scaler skips a step when gradients overflow in float16, and lowers its scale. If it skips most steps,
    some value overflows at any scale: use bfloat16, or find the layer with the hook activations (max_abs).

    Applies to: float16 with a loss scaler

    Source: Micikevicius et al., arXiv 1710.03740
    """

    name = "scaler-skips-steps"
    stage = "gradients"
    share = Threshold(0.3, "a healthy scaler skips a few steps at the start and one in about 2,000 later")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if many steps have no finite gradient."""
        norms = history.gradient_norms
        if not history.facts.get("scaler") or len(norms) < 20:
            return
        is_skipped = ~np.isfinite(norms.values)
        share = float(is_skipped.mean())
        if share > self.share:
            why = f"The loss scaler skipped {share:.0%} of the steps, since gradients overflowed in float16."
            remedy = "Use bfloat16, torch.autocast(device_type, dtype=torch.bfloat16), without a scaler."
            evidence = Evidence("training_checks/grad_norm", f"{share:.0%} not finite", self.share, "below 1 %")
            yield self.finding("critical", norms.first_step_where(is_skipped) or 0, why, remedy, evidence)
