"""The phases of grokking (memorisation, circuit formation, clean-up) from the train/test gap and the weight norm."""

from dataclasses import dataclass

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics
from torch import Tensor

from ..measures import compute_once, joint_weight_norm

MEMORISATION, CIRCUIT_FORMATION, CLEAN_UP, GENERALISED = range(4)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class Phases(TrainingHook):
    """Distinguish the phases of grokking, and date the transitions between them.

    Assumes that the evaluation reports ``train_acc`` and ``val_acc``. A transition is dated at the first evaluation
    that meets its condition, and the date is final. Circuit formation starts when the training set is memorised but
    accuracy on held-out data lags behind. Clean-up starts when that gap has shrunk and the weight norm has dropped
    below its maximum. Both phases end when the gap has closed. The names are those of Nanda et al. 2023
    (arXiv 2301.05217), who distinguish the phases by restricted and excluded loss (hook ``fourier``). The defaults were
    set on one run, the quick preset of mod_arithmetic under ``random``; another weight decay may need another
    norm_drop.

    Args:
        memorised: training accuracy from which on the training set counts as memorised.
        closed: largest gap train_acc − val_acc at which a memorised model counts as generalised.
        gap_share: clean-up needs a gap of at most this share of the widest gap since memorisation.
        norm_drop: clean-up needs a weight norm below its maximum over the evaluations by this fraction; 0 accepts any.
    """

    name = "phases"
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.SNAPSHOT})}
    _epochs = Remembered(dict[str, int])
    """Epochs of the transitions by metric."""
    _widest_gap = Remembered(float)
    _largest_norm = Remembered[Tensor | None](None)
    _cleanup_epoch = Remembered[Tensor | None](None)
    metrics = """
        phase | 0 memorisation, until train_acc ≥ memorised; 1 circuit formation, until the condition of cleanup_epoch;
            2 clean-up, until that of generalised_epoch; 3 generalised | {0, 1, 2, 3}, never falls
            | Directly from 0 to 3: the model generalised while it learned. 1 to the end: it only memorised.
        generalisation_gap | train_acc − val_acc of the evaluation | [−1, 1]
            | Wide after memorisation, about 0 once the model generalises.
        weight_norm | ‖θ‖₂ over all trainable parameters | [0, ∞) | Falls during clean-up.
        norm_drop | 1 − ‖θ‖₂ / max ‖θ‖₂ over the evaluations up to now | [0, 1), NaN
            | 0: the weights still grow. Clean-up needs at least the option norm_drop.
        memorised_epoch | the first epoch with train_acc ≥ memorised | 0, 1, 2, ...
            | End of memorisation and start of circuit formation; omitted until then.
        cleanup_epoch | the first epoch, from memorised_epoch to generalised_epoch, with gap ≤ gap_share · (widest gap
            since memorised_epoch) and norm_drop ≥ the option norm_drop | 0, 1, 2, ..., NaN
            | Start of clean-up; NaN: not yet, or never. Omitted before memorised_epoch, and if the gap was closed at
            memorised_epoch already.
        generalised_epoch | the first epoch, from memorised_epoch on, with train_acc ≥ memorised and gap ≤ closed
            | 0, 1, 2, ... | When the model generalised; omitted until then.
    """

    memorised: float = 0.95
    closed: float = 0.05
    gap_share: float = 0.5
    norm_drop: float = 0.005

    def __post_init__(self) -> None:
        for option, value in {"memorised": self.memorised, "gap_share": self.gap_share}.items():
            require(0 < value <= 1, f"phases.{option} is {value}; it must be in (0, 1].")
        for option, value in {"closed": self.closed, "norm_drop": self.norm_drop}.items():
            require(0 <= value < 1, f"phases.{option} is {value}; it must be in [0, 1).")

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the phase, the gap, the weight norm and the dates so far; nothing without an evaluation.

        Raises:
            UnsuitableError: if the evaluation lacks one of the accuracies.
        """
        if ctx.train_acc is None or ctx.val_acc is None:
            if ctx.evaluation:
                raise UnsuitableError(
                    "Hook 'phases' compares train_acc with val_acc, but the experiment's evaluation reports only "
                    f"{', '.join(ctx.evaluation)}."
                )
            return {}
        gap = ctx.train_acc - ctx.val_acc
        weight_norm = compute_once(ctx, joint_weight_norm)
        earlier = weight_norm if self._largest_norm is None else self._largest_norm.to(weight_norm.device)
        self._largest_norm = torch.maximum(weight_norm, earlier)
        drop = 1 - weight_norm / self._largest_norm
        phase = self._advance(ctx.train_acc, gap, drop, ctx.epoch)
        metrics = {
            "phase": phase,
            "generalisation_gap": gap,
            "weight_norm": weight_norm,
            "norm_drop": drop,
            **self._epochs,
        }
        return metrics if self._cleanup_epoch is None else metrics | {"cleanup_epoch": self._cleanup_epoch}

    def _advance(self, train_acc: float, gap: float, drop: Tensor, epoch: int) -> int | Tensor:
        """Date the transitions at this evaluation and return its phase.

        Quantities on the device stay there: ``torch.where`` replaces branches that would wait for their values.
        """
        if "generalised_epoch" in self._epochs:
            return GENERALISED
        closed = train_acc >= self.memorised and gap <= self.closed
        if "memorised_epoch" not in self._epochs:
            if train_acc < self.memorised:
                return MEMORISATION
            self._epochs["memorised_epoch"] = epoch
            if not closed:
                self._cleanup_epoch = drop.new_full((), torch.nan)
        self._widest_gap = max(self._widest_gap, gap)
        if self._cleanup_epoch is not None:
            cleanup_epoch = self._cleanup_epoch.to(drop.device)
            starts_now = (drop >= self.norm_drop) & (gap <= self.gap_share * self._widest_gap)
            self._cleanup_epoch = torch.where(cleanup_epoch.isnan() & starts_now, float(epoch), cleanup_epoch)
        if closed:
            self._epochs["generalised_epoch"] = epoch
        if closed or self._cleanup_epoch is None:
            return GENERALISED
        return torch.where(self._cleanup_epoch.isnan(), CIRCUIT_FORMATION, CLEAN_UP)
