"""What the pages of a ledger are told as: metrics, warnings and the table at the end of a run."""

from typing import Any

import numpy as np
from loopscope.hooks import Remembered, Remembering

from ..measures import Alerts
from .overflow_ledger import ALL, CUMULATIVE, CUMULATIVE_BY_ROLE, NOISE, OVERFLOW, Ledger, Page, plain, readings

Values = dict[str, float | int]
TABLE = (
    *("total_quantizations", "overflow_count", "batch_overflow_rate"),
    *("total_elements", "total_overflow_elements", "element_overflow_rate"),
    *("underflow_rate", "gradient_to_noise_ratio"),
)
"""The readings in the table at the end of a run."""
HYSTERESIS = 2.0
"""A warned condition ends where the value is back within its threshold by this factor."""


def of_gradients(role: str) -> bool:
    """Return whether what is quantised in a role is a gradient."""
    return role == "output_grad" or role.startswith("gradients/")


def values_together(page: Page) -> Values:
    """Return the readings over all roles, of the step and of the run so far."""
    step, run = page.over((0, 1))
    return {name: plain(name, value) for name, value in step.items()} | {
        f"cumulative_{name}": plain(name, run[name]) for name in CUMULATIVE
    }


def values_by_role(page: Page, top_k: int) -> Values:
    """Return the readings of the roles in which anything was quantised, and those of their worst layers."""
    step, run = page.over((0,))
    found: Values = {}
    for index in page.heard():
        role = page.roles[index]
        found |= {f"{name}_of/{role}": plain(name, values[index]) for name, values in step.items()}
        found |= {f"cumulative_{name}_of/{role}": plain(name, run[name][index]) for name in CUMULATIVE_BY_ROLE}
        overflowing = [pair for pair in page.worst(OVERFLOW, index, largest=True)[:top_k] if pair[1] > 0]
        found |= {f"topk_{OVERFLOW}/{layer}/{role}": value for layer, value in overflowing}
        if of_gradients(role):
            noisy = page.worst(NOISE, index, largest=False)[:top_k]
            found |= {f"topk_{NOISE}/{layer}/{role}": value for layer, value in noisy}
    return found


class Alarm(Remembering):
    """Warns when layers begin to overflow, or their gradients to drown in noise, and when that is over.

    Args:
        most_overflow: the share of a layer's elements in a role above which it overflows.
        least_ratio: the ratio of gradient to noise below which a gradient drowns.
    """

    alerts = Remembered(lambda alarm: Alerts(alarm.phrases, noun="cast"), by_options=True, merged=True)

    def __init__(self, most_overflow: float, least_ratio: float) -> None:
        self._most_overflow = most_overflow
        self._least_ratio = least_ratio
        above, below = f"in more than {most_overflow:.3g} of", f"a gradient-to-noise ratio below {least_ratio:.3g}"
        self.phrases = {
            OVERFLOW: (f"overflows {above} its elements", f"overflow {above} their elements"),
            NOISE: (f"has {below}", f"have {below}"),
        }

    def see(self, page: Page, step: int) -> None:
        """Note the layers that overflow, and those whose gradients drown in noise, on a page."""
        values = readings(page.sums, page.maxima)
        overflow, noise = values[OVERFLOW], values[NOISE].copy()
        noise[:, [not of_gradients(role) for role in page.roles]] = np.nan
        self._note(OVERFLOW, page, -overflow, -self._most_overflow, -self._most_overflow / HYSTERESIS, step)
        self._note(NOISE, page, noise, self._least_ratio, self._least_ratio * HYSTERESIS, step)

    def _note(self, condition: str, page: Page, values: Any, begins: float, ends: float, step: int) -> None:
        """Find the casts with values below ``begins``, and of those told of already the ones below ``ends``."""
        told, found = self.alerts.told(condition), {}
        for layer, role in np.argwhere(values < ends).tolist():
            name, value = f"{page.layers[layer]} {page.roles[role]}", float(values[layer, role])
            if value < begins or name in told:
                found[name] = value
        texts = {name: f"{abs(value):.3g}" for name, value in sorted(found.items(), key=lambda item: item[1])}
        self.alerts.see(condition, texts, step=step, checked=int((~np.isnan(values)).sum()))


def summary(ledger: Ledger, *, together: bool) -> dict[str, Values]:
    """Return the table of the whole run, a row for each role, and one for all of them ``together``."""
    found = ledger.of_the_run()
    return {
        role: {name: plain(name, values[name]) for name in TABLE}
        for role, values in found.items()
        if together or role != ALL
    }
