"""Counts of quantisations by layer and role: of the step in progress, and of the run so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from loopscope.lowbit.casts import MAXIMA, SUMS, Counts
from torch import Tensor, distributed

from .overflow_readings import Numbers, readings

OVERFLOW, NOISE = "element_overflow_rate", "gradient_to_noise_ratio"
ALL = "all roles"
QUANTIZATIONS = SUMS.index("quantizations")


@dataclass(frozen=True)
class Page:
    """The counts of a step and of the run so far on the host, each of shape (layers, roles, numbers)."""

    layers: Sequence[str]
    roles: Sequence[str]
    sums: Numbers
    maxima: Numbers
    run_sums: Numbers

    def heard(self) -> list[int]:
        """Return the roles, by position, in which anything was quantised in this step."""
        return np.flatnonzero(self.sums[..., QUANTIZATIONS].any(0)).tolist()

    def over(self, axes: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the readings over some axes of the step and of the run so far, which has none that need maxima."""
        maxima = self.maxima.max(axes)
        return readings(self.sums.sum(axes), maxima), readings(self.run_sums.sum(axes), np.zeros_like(maxima))

    def worst(self, reading: str, role: int, *, largest: bool) -> list[tuple[str, float]]:
        """Return the layers that have a reading in a role, the worst first, ties in the order of the model."""
        values = readings(self.sums[:, role], self.maxima[:, role])[reading]
        order = np.argsort(-values if largest else values, kind="stable")
        return [(self.layers[index], float(values[index])) for index in order if not np.isnan(values[index])]


class Ledger:
    """Adds up counts on their device, and hands out pages of them, each with one transfer to the host.

    Args:
        layers: the names of the layers or tensors.
        roles: what is quantised of them.
        shared: ranks see different values, so that theirs are added up.
    """

    def __init__(self, layers: Sequence[str] = (), roles: Sequence[str] = (), *, shared: bool = False) -> None:
        self.layers = list(layers)
        self.roles = list(roles)
        self.steps = 0
        """Pages so far."""
        self.open: dict[str, dict[str, Counts]] = {layer: {} for layer in self.layers}
        """The counts of the step in progress by layer and role, where there are any."""
        self._shared = shared
        self._run: Counts | None = None

    def clear(self) -> None:
        """Forget the step in progress."""
        for counts in self.open.values():
            counts.clear()

    def add(self, layer: str, role: str, counts: Counts) -> None:
        """Add what one quantisation lost."""
        known = self.open[layer].get(role)
        self.open[layer][role] = counts if known is None else joined(known, counts)

    def turn(self, device: torch.device) -> Page | None:
        """Close the step and return its page, made on ``device``; nothing without layers.

        Among ranks it is one reduction of the sums and one of the maxima.
        """
        if not self.layers:
            return None
        step = self._gathered(device)
        self.clear()
        self.steps += 1
        before = self._run and Counts(self._run.sums.to(device), self._run.maxima.to(device))
        self._run = step if before is None else joined(before, step)
        parts = [step.sums, step.maxima, self._run.sums]
        flat = torch.cat([part.flatten() for part in parts]).cpu().numpy()
        sums, maxima, run_sums = np.split(flat, np.cumsum([part.numel() for part in parts])[:-1])
        shape = len(self.layers), len(self.roles)
        return Page(
            self.layers,
            self.roles,
            sums.reshape(*shape, len(SUMS)),
            maxima.reshape(*shape, len(MAXIMA)),
            run_sums.reshape(*shape, len(SUMS)),
        )

    def _gathered(self, device: torch.device) -> Counts:
        """Return the step's counts of all ranks, of shape (layers, roles)."""
        nothing = Counts.zeros(device=device)
        grid = [self.open[layer].get(role, nothing) for layer in self.layers for role in self.roles]
        shape = len(self.layers), len(self.roles)
        sums = torch.stack([counts.sums.to(device) for counts in grid]).view(*shape, len(SUMS))
        maxima = torch.stack([counts.maxima.to(device) for counts in grid]).view(*shape, len(MAXIMA))
        if self._shared and distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(sums, op=distributed.ReduceOp.SUM)
            distributed.all_reduce(maxima, op=distributed.ReduceOp.MAX)
        return Counts(sums, maxima)

    def of_the_run(self) -> dict[str, dict[str, Any]]:
        """Return the readings of the run so far of each role in which anything was quantised, ``all`` of them last."""
        if self._run is None:
            return {}
        both = torch.cat([self._run.sums, self._run.maxima], -1).cpu().numpy()
        sums, maxima = np.split(both, [len(SUMS)], -1)
        by_role = readings(sums.sum(0), maxima.max(0))
        heard = np.flatnonzero(by_role["total_quantizations"]).tolist()
        found = {self.roles[index]: {name: values[index] for name, values in by_role.items()} for index in heard}
        return found | {ALL: readings(sums.sum((0, 1)), maxima.max((0, 1)))}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the run so far, and what they are of; the step in progress begins anew."""
        run = {} if self._run is None else {"sums": self._run.sums, "maxima": self._run.maxima}
        return {"layers": self.layers, "roles": self.roles, "steps": self.steps, "run": run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`; counts of other layers or roles are left, and begin anew."""
        if self.layers and (self.layers, self.roles) != (state["layers"], state["roles"]):
            return
        if not self.layers:
            self.layers, self.roles = list(state["layers"]), list(state["roles"])
            self.open = {layer: {} for layer in self.layers}
        run: Mapping[str, Tensor] = state["run"]
        self._run = Counts(run["sums"], run["maxima"]) if run else None
        self.steps = state["steps"]


def joined(one: Counts, other: Counts) -> Counts:
    """Return the sum of two counts; neither is changed."""
    return Counts(one.sums + other.sums, torch.maximum(one.maxima, other.maxima))
