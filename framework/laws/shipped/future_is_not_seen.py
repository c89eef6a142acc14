"""The law that a model of next tokens does not see them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..law import Law, Outcome, broken, holds, not_checked
from ..rows import UndecidedError
from ..trial import TIMES_NOISE, Trial

LEAST = 4
"""Positions that a sequence needs, and different values by which a shift is recognised."""
PLACES = (0.25, 0.5, 0.75)
"""Where the sequence is cut, as parts of its length."""
MOST_SCORED = 0.5
"""The part of the outputs that one position of the targets may concern."""


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
        given = trial.inputs[found.index]
        tokens = _sequence(given, found.time)
        is_changed = False
        for place in _places(tokens):
            scored = found.scored_at(trial, place)
            later = tokens.clone()
            later[:, place + 1 :] = tokens.roll(1, 0)[:, place + 1 :].flip(1)
            changed = {found.index: later.reshape(given.movedim(found.time, 1).shape).movedim(1, found.time)}
            before, after = (trial.evaluate(value, needs_loss=False, train=False).outputs for value in (None, changed))
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
    time: int = 1
    """The dimension of the positions in the input."""

    def scored_at(self, trial: Trial, place: int) -> Tensor:
        """Return which outputs the loss compares with the value after a position: those whose gradients it changes.

        Raises:
            UndecidedError: the loss does not show it.
        """
        trial.loss_step()
        target = trial.step.constants[self.target]
        is_flat = _sequence(trial.inputs[self.index], self.time).ndim == 2
        rows = (target.reshape(trial.rows, -1) if is_flat else target.movedim(self.time, 1)).clone()
        rows[:, place + self.offset] = rows.roll(1, 0)[:, place + self.offset]
        other = rows.reshape(target.shape) if is_flat else rows.movedim(1, self.time)
        before, after = (trial.output_gradient(value) for value in (None, {self.target: other}))
        if before is None or after is None:
            raise UndecidedError("the loss does not show which outputs belong to a position")
        changed = before != after
        # A loss over the sequence as a whole changes the gradients of all positions.
        if not changed.any() or float(changed.double().mean()) > MOST_SCORED:
            raise UndecidedError("the loss does not show which outputs belong to a position")
        return changed


def _prediction(trial: Trial, index: int) -> _Prediction | None:
    """Return the constant that is this input, shifted by one position."""
    given, count = trial.inputs[index], trial.rows
    if given.ndim < 2 or len(given) != count or given.dtype is torch.bool:
        return None
    others = sorted({*trial.step.constants_of_calls(), *trial.inputs} - {index})
    candidates = (_Prediction(index, other, 0, time) for time in sorted({1, given.ndim - 1}) for other in others)
    return next(filter(None, (_verified(trial, candidate) for candidate in candidates)), None)


def _verified(trial: Trial, candidate: _Prediction) -> _Prediction | None:
    """Return a prediction if its target is its input, shifted by one position, with the right offset."""
    tokens = _sequence(trial.inputs[candidate.index], candidate.time)
    target = trial.step.constants[candidate.target]
    if tokens.shape[1] < LEAST or (tokens.ndim == 2 and target.numel() % len(tokens)):
        return None
    if tokens.ndim > 2:
        is_next = target.shape == trial.inputs[candidate.index].shape and _are_equal(
            tokens[:, 1:], target.movedim(candidate.time, 1)[:, :-1]
        )
        return candidate if is_next else None
    rows = target.reshape(len(tokens), -1)
    if rows.shape == tokens.shape and _are_equal(tokens[:, 1:], rows[:, :-1]):  # data[:, :-1], data[:, 1:]
        return candidate
    if target.dtype != tokens.dtype:
        return None
    if rows.shape[1] == tokens.shape[1] - 1 and _are_equal(tokens[:, 1:], rows):  # the loss leaves out the first
        return candidate
    if candidate.target in trial.inputs and rows.shape == tokens.shape and _are_equal(tokens, rows):
        labels = replace(candidate, offset=1)  # of models of Hugging Face, which shift labels themselves
        return labels if _is_earlier(trial, labels) else None
    return None


def _sequence(tensor: Tensor, time: int) -> Tensor:
    """Return a tensor with rows and positions as first dimensions, and no others of one element."""
    moved = tensor.movedim(time, 1)
    return moved.reshape(moved.shape[:2]) if moved.numel() == moved.shape[:2].numel() else moved


def _are_equal(tokens: Tensor, targets: Tensor) -> bool:
    """Return whether targets are tokens, apart from ignored ones, with enough different values to tell.

    Whole numbers may also be codes of the values, each of one value.
    """
    known = targets >= 0 if not targets.is_floating_point() else torch.ones_like(targets, dtype=torch.bool)
    tokens, targets = tokens[known], targets[known]
    if targets.dtype != tokens.dtype:
        tokens, targets = (torch.unique(item, return_inverse=True)[1] for item in (tokens, targets))
    return torch.equal(tokens, targets) and len(torch.unique(tokens)) >= LEAST


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
