"""The law that a model of next tokens does not see them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..law import Law, LawRegistry, Outcome, broken, holds, not_checked
from ..rows import UndecidedError
from ..trial import TIMES_NOISE, Trial

LEAST = 4
"""Positions that a sequence needs, and different values by which a shift is recognised."""
PLACES = (0.25, 0.5, 0.75)
"""Where the sequence is cut, as parts of its length."""
MOST_SCORED = 0.5
"""The part of the outputs that one position of the targets may concern."""


@LawRegistry.register
class FutureIsNotSeen(Law):
    """Change all inputs after a position, and compare the outputs that are scored with the next one.

    The law applies if the targets of the loss are the inputs, shifted by one position.
    """

    name = "future_is_not_seen"
    statement = "no output depends on later positions of its sequence"
    remedy = "mask later positions in attention, pad convolutions on the left, and shift inputs against targets once"

    def check(self, trial: Trial) -> Outcome:
        """Find the sequence, and the outputs that are scored with one of its positions; then compare."""
        found = next(filter(None, (_prediction(trial, index) for index in trial.inputs)), None)
        if found is None:
            if name := sees_its_target(trial):
                return broken(f"an output depends on the value of {name} with which it is compared")
            return not_checked("no input is a sequence whose next positions are the targets")
        tokens = trial.inputs[found.index]
        is_changed = False
        for place in _places(tokens):
            scored = found.scored_at(trial, place)
            later = tokens.clone()
            later[:, place + 1 :] = tokens.roll(1, 0)[:, place + 1 :].flip(1)
            before, after = (
                trial.evaluate(value, needs_loss=False, train=False).outputs for value in (None, {found.index: later})
            )
            for position, (one, other) in enumerate(zip(before, after, strict=True)):
                is_changed |= not torch.equal(one, other)
                if one.shape == scored.shape:
                    size = float(((one.double() - other.double()).abs() * scored).max())
                    if size and size > TIMES_NOISE * trial.output_noise[position]:
                        return broken(f"an output for position {place} changes by {size:.1e} with inputs after it")
        return holds() if is_changed else not_checked("no output depends on the changed inputs")


@dataclass(frozen=True)
class _Prediction:
    """A sequence among the inputs, and the constant with its next positions."""

    index: int
    target: int
    offset: int
    """The position in the targets of the value after position 0 of the sequence."""

    def scored_at(self, trial: Trial, place: int) -> Tensor:
        """Return which outputs the loss compares with the value after a position: those whose gradients it changes.

        Raises:
            UndecidedError: the loss does not show it.
        """
        trial.loss_step()
        target = trial.step.constants[self.target]
        rows = target.reshape(trial.rows, -1).clone()
        rows[:, place + self.offset] = rows.roll(1, 0)[:, place + self.offset]
        before, after = (trial.output_gradient(value) for value in (None, {self.target: rows.reshape(target.shape)}))
        if before is None or after is None:
            raise UndecidedError("the loss does not show which outputs belong to a position")
        changed = before != after
        # A loss over the sequence as a whole changes the gradients of all positions.
        if not changed.any() or float(changed.double().mean()) > MOST_SCORED:
            raise UndecidedError("the loss does not show which outputs belong to a position")
        return changed


def _prediction(trial: Trial, index: int) -> _Prediction | None:
    """Return the constant that is this input, shifted by one position."""
    tokens, count = trial.inputs[index], trial.rows
    if tokens.ndim != 2 or tokens.shape[1] < LEAST or len(tokens) != count or tokens.dtype is torch.bool:
        return None
    for other in sorted({*trial.step.constants_of_calls(), *trial.inputs} - {index}):
        target = trial.step.constants[other]
        if target.numel() % count or target.dtype != tokens.dtype:
            continue
        rows = target.reshape(count, -1)
        if rows.shape[1] == tokens.shape[1] and _are_equal(tokens[:, 1:], rows[:, :-1]):  # data[:, :-1], data[:, 1:]
            return _Prediction(index, other, 0)
        if rows.shape[1] == tokens.shape[1] - 1 and _are_equal(tokens[:, 1:], rows):  # the loss leaves out the first
            return _Prediction(index, other, 0)
        if other in trial.inputs and rows.shape == tokens.shape and _are_equal(tokens, rows):
            labels = _Prediction(index, other, 1)  # of models of Hugging Face, which shift labels themselves
            if _is_earlier(trial, labels):
                return labels
    return None


def _are_equal(tokens: Tensor, targets: Tensor) -> bool:
    """Return whether targets are tokens, apart from ignored ones, with enough different values to tell."""
    known = targets >= 0 if not targets.is_floating_point() else torch.ones_like(targets, dtype=torch.bool)
    return torch.equal(tokens[known], targets[known]) and len(torch.unique(tokens[known])) >= LEAST


def _is_earlier(trial: Trial, labels: _Prediction) -> bool:
    """Return whether a label is compared with the outputs of the position before it."""
    place = trial.inputs[labels.index].shape[1] // 2
    try:
        scored = labels.scored_at(trial, place)
    except UndecidedError:
        return False
    positions = scored.flatten(2).any(2).any(0) if scored.ndim > 2 else scored.any(0)
    return positions.nonzero().flatten().tolist() == [place]


def _places(tokens: Tensor) -> list[int]:
    """Return the positions at which a sequence is cut."""
    return sorted({int(tokens.shape[1] * part) for part in PLACES})


def sees_its_target(trial: Trial) -> str:
    """Return the name of an input whose positions are the targets of outputs that see them, if there is one.

    Only outputs that see no later position are judged, as of a decoder: an autoencoder sees its targets by design.
    """
    for index, tokens in trial.inputs.items():
        is_sequence = tokens.ndim == 2 and tokens.shape[1] >= LEAST and len(tokens) == trial.rows
        if not is_sequence or tokens.is_floating_point() or tokens.dtype is torch.bool:
            continue
        for other in sorted(trial.step.constants_of_calls()):
            target = trial.step.constants[other]
            is_own = target.numel() == tokens.numel() and target.dtype == tokens.dtype
            if not is_own or not _are_equal(tokens, target.reshape(tokens.shape)):
                continue
            if all(_sees_only_earlier(trial, _Prediction(index, other, 0), place) for place in _places(tokens)):
                return trial.names.get(index, "") or f"input {index}"
    return ""


def _sees_only_earlier(trial: Trial, own: _Prediction, place: int) -> bool:
    """Return whether outputs that are scored with a position depend on it, and on none after it."""
    tokens, scored = trial.inputs[own.index], own.scored_at(trial, place)
    here, later = tokens.clone(), tokens.clone()
    here[:, place] = tokens.roll(1, 0)[:, place]
    later[:, place + 1 :] = tokens.roll(1, 0)[:, place + 1 :].flip(1)
    changed = [
        any(
            bool(((one != other) & scored).any())
            for one, other in zip(before, after, strict=True)
            if one.shape == scored.shape
        )
        for before, after in (
            [trial.evaluate(value, needs_loss=False, train=False).outputs for value in (None, {own.index: sequence})]
            for sequence in (here, later)
        )
    ]
    return changed[0] and not changed[1]
