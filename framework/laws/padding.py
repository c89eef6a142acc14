"""Sequences of different lengths that no mask shows: their rows end with one content that is nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .rows import UndecidedError, is_mask
from .trial import LEAST_PART, TIMES_NOISE, Trial

LEAST_WIDTH = 4
LEAST_LENGTHS = 3
"""Different lengths in a batch, so that a mark at the end of some rows is no padding."""


@dataclass(frozen=True)
class Padded:
    """An input whose rows end with padding."""

    index: int
    positions: Tensor
    """Which positions are padding, of shape (rows, width)."""

    @classmethod
    def of(cls, trial: Trial) -> list["Padded"]:
        """Return the padded inputs of a step."""
        found = []
        for index, tensor in trial.inputs.items():
            if len(tensor) == trial.rows and (positions := tail_of(tensor)) is not None:
                found.append(cls(index, positions))
        return found

    def cropped(self, trial: Trial) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        """Return the inputs with the short rows alone, those without the padding that all of these have, and the rest.

        The last result is the padding of the cropped rows.
        """
        lengths = (~self.positions).sum(1)
        width = int(lengths.sort().values[trial.rows // 2 - 1])
        short = (lengths <= width).nonzero().flatten()
        order = short[torch.arange(trial.rows) % len(short)].cpu()
        rows = trial.inputs_with_rows(order)
        before = {index: rows.get(index, item) for index, item in trial.inputs.items()}
        after = {index: self._without_end(item, width) for index, item in before.items()}
        return before, after, self.positions[order][:, :width]

    def _without_end(self, item: Tensor, width: int) -> Tensor:
        """Return an input without positions after a width, in all dimensions that are those of the sequence."""
        whole = self.positions.shape[1]
        if item.ndim < 3 or item.shape[1:3] == (whole, whole):
            dimensions: Sequence[int] = [place for place, size in enumerate(item.shape) if size == whole and place < 3]
        else:
            dimensions = [1] if item.shape[1] == whole else []
        if len(dimensions) > 1 and item.shape[0] == len(self.positions):
            dimensions = [place for place in dimensions if place]
        for place in dimensions:
            item = item.narrow(place, 0, width)
        return item


def tail_of(tensor: Tensor) -> Tensor | None:
    """Return which positions of a sequence, of shape (rows, width, ...), are padding at the end of rows, if any are.

    Padding is one content that no other position has: a whole number, or zeros.
    """
    if tensor.ndim < 2 or tensor.shape[1] < LEAST_WIDTH or tensor.dtype is torch.bool or is_mask(tensor):
        return None
    if tensor.is_floating_point():
        is_pad = (tensor.reshape(*tensor.shape[:2], -1) == 0).all(-1)
    elif tensor.ndim == 2:
        ends = tensor[:, -1]
        is_pad = tensor == (0 if bool((ends == 0).any()) else ends.mode().values)
    else:
        return None
    tail = is_pad.flip(1).cumprod(1).flip(1).bool()
    lengths = tail.sum(1)
    is_padded = torch.equal(tail, is_pad) and int((lengths > 1).sum()) > 1 and int(lengths.max()) < tensor.shape[1]
    return tail if is_padded and len(torch.unique(lengths)) >= LEAST_LENGTHS else None


def marks_ends(tokens: Tensor, padded: Tensor) -> bool:
    """Return whether padding has one content that is nowhere else: a model may find the ends of rows by it.

    Pooling at the last token of the classifiers of transformers does, also with a mask.
    """
    contents: Tensor = torch.unique(tokens[padded], dim=0)
    is_elsewhere = (tokens[~padded] == contents[0]).reshape(int((~padded).sum()), -1).all(1).any()
    return len(contents) == 1 and not bool(is_elsewhere) and bool((padded.int().diff() >= 0).all())


def sees_padding(trial: Trial, padded: Padded) -> str:
    """Return how an output changes if short rows lose their padding; an empty text if none does.

    Raises:
        Exception: the model does not accept shorter sequences.
    """
    constants, shorter, padding = padded.cropped(trial)
    before, after = (trial.evaluate(item, needs_loss=False, train=False).outputs for item in (constants, shorter))
    return _difference(trial, padding, before, after, "if its row has less padding")


def sees_embedded_padding(trial: Trial, padded: Padded) -> str:
    """Return how an output changes if embeddings of padding are those of other symbols, in a model with attention."""
    modules = list(trial.model.modules())
    if not any(isinstance(item, nn.MultiheadAttention) for item in modules):
        raise UndecidedError("the model does not accept shorter sequences")

    def changed(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not inputs or not torch.equal(inputs[0], trial.inputs[padded.index]):
            return output
        valid = output[~padded.positions]
        places = torch.arange(int(padded.positions.sum()), device=output.device) % len(valid)
        return output.masked_scatter(padded.positions[..., None], valid[places])

    before = trial.evaluate(needs_loss=False, train=False).outputs
    handles = [item.register_forward_hook(changed) for item in modules if isinstance(item, nn.Embedding)]
    try:
        after = trial.evaluate(needs_loss=False, train=False).outputs
    finally:
        for handle in handles:
            handle.remove()
    return _difference(trial, padded.positions, before, after, "with the embedding of padding")


def _difference(trial: Trial, padding: Tensor, before: list[Tensor], after: list[Tensor], reason: str) -> str:
    """Return a sentence if an output of a row, or at a valid position of it, differs by more than rounding."""
    rows, width = padding.shape
    for position, (one, other) in enumerate(zip(before, after, strict=True)):
        if not one.is_floating_point() or not one.ndim or len(one) != rows:
            continue
        is_sequence = one.ndim > 1 and other.shape[:2] == padding.shape and one.shape[1] >= width
        if is_sequence:
            one, other = one[:, :width][~padding], other[~padding]
        if one.shape != other.shape:
            continue
        size = float((one.double() - other.double()).abs().max())
        if size > max(TIMES_NOISE * trial.output_noise[position], LEAST_PART * float(one.abs().max())):
            return f"an output{' at a valid position' if is_sequence else ''} changes by {size:.1e} {reason}"
    return ""


def scores_padding(trial: Trial, padded: Padded) -> bool:
    """Return whether the loss compares outputs at padded positions with padded targets."""
    if trial.step.problem or not _has_padded_targets(trial, padded):
        return False
    gradient = trial.output_gradient()
    shape = padded.positions.shape
    if gradient is None or gradient.ndim < 2:
        return False
    if gradient.shape[:2] != shape:
        if len(gradient) != shape.numel():
            return False
        gradient = gradient.reshape(*shape, *gradient.shape[1:])
    return bool(gradient[padded.positions].any())


def _has_padded_targets(trial: Trial, padded: Padded) -> bool:
    shape = padded.positions.shape
    for index in trial.step.constants_of_calls() - set(trial.inputs):
        target = trial.step.constants[index]
        if target.dtype is torch.bool or target.numel() < shape.numel() or target.numel() % shape.numel():
            continue
        if target.shape[:2] != shape and len(target) != shape.numel():
            continue
        tail = tail_of(
            target.reshape(*shape, *target.shape[2:]) if target.shape[:2] == shape else target.reshape(shape)
        )
        if tail is not None and bool((tail | ~padded.positions).all()):
            return True
    return False
