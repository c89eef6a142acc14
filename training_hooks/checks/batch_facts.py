"""The inputs and targets of a batch, and their statistics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from loopscope.data import MicroBatches
from loopscope.state import visited
from torch import Tensor

from .host_tensors import is_on_host

TARGET_NAMES = ("labels", "label", "targets", "target", "y")
OTHER_NAMES = ("mask", "ids", "index", "indices", "length", "weight", "position")
"""Parts of the names of integer tensors that are neither inputs nor targets, unless they are the first ones."""
MOST_ELEMENTS = 2**18
"""Elements of which statistics are computed, of the first rows."""
MOST_BINS = 2**20
"""The largest class for which classes are counted in bins."""
IGNORED = -100
"""The target that torch's losses ignore."""
LEAST_RUN = 3
"""Equal targets at the end of a row that count as padding."""
MOST_INSIDE = 0.1
"""Share of the padding's id that may occur before the ends of rows; more is a frequent target, such as "no entity"."""


@dataclass(frozen=True)
class BatchPart:
    """The inputs of a micro-batch, its targets if it has some, and those of a decoder by their usual name."""

    inputs: Tensor
    targets: Tensor | None = None
    decoder_inputs: Tensor | None = None
    mask: Tensor | None = None
    """Ones for the tokens of each row, zeros for its padding."""


def parts_of(batch: Any) -> list[BatchPart]:
    """Return inputs and targets of each micro-batch; nothing for those without inputs on the CPU.

    Inputs are the first floating-point tensor with several numbers per row, or else the first such integer tensor, or
    else the first floating-point tensor. Targets are the tensor with a usual name, or else the last integer tensor that
    is not the inputs; with integer inputs a number per row, such as a score, is more likely the target than an
    integer, such as a length, so that there none is known.
    """
    batches = batch if isinstance(batch, MicroBatches) else [batch]
    return [part for item in batches if (part := _part(item)) is not None]


def _part(batch: Any) -> BatchPart | None:
    leaves = ((path.rpartition("/")[2], _as_tensor(leaf)) for path, leaf, _ in visited("", batch))
    named = [(name, leaf) for name, leaf in leaves if leaf is not None]
    usual = next((leaf for name, leaf in named if name in TARGET_NAMES), None)
    others = [(name, leaf) for name, leaf in named if leaf is not usual]
    numbers = [leaf for name, leaf in others if leaf.is_floating_point() and not _is_auxiliary(name)]
    candidates = [leaf for leaf in numbers if leaf.ndim >= 2]
    candidates += [leaf for name, leaf in others if _is_integer(leaf) and leaf.ndim >= 2 and "mask" not in name.lower()]
    candidates += [leaf for leaf in numbers if leaf.ndim == 1]
    if not candidates:
        return None
    inputs = candidates[0]
    decoder_inputs = next((leaf for name, leaf in named if name == "decoder_input_ids" and leaf.ndim == 2), None)
    remaining = [leaf for name, leaf in others if _is_integer(leaf) and leaf is not inputs and not _is_auxiliary(name)]
    has_scores = _is_integer(inputs) and any(leaf.ndim == 1 for leaf in numbers)
    targets = usual if usual is not None else (remaining[-1] if remaining and not has_scores else None)
    mask = next((leaf for name, leaf in named if name == "attention_mask" and leaf.ndim == 2), None)
    return BatchPart(inputs, targets, decoder_inputs, mask)


def _as_tensor(leaf: Any) -> Tensor | None:
    """Return a tensor on the CPU, or an array of numbers as a tensor; ``None`` for anything else, or if it is empty."""
    if isinstance(leaf, np.ndarray):
        try:
            leaf = torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
        except (TypeError, ValueError):  # arrays of texts or objects, or with negative strides
            return None
    is_plain = isinstance(leaf, Tensor) and is_on_host(leaf) and leaf.layout is torch.strided
    return leaf if is_plain and leaf.ndim > 0 and leaf.numel() > 0 else None


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _is_auxiliary(name: str) -> bool:
    return any(part in name.lower() for part in OTHER_NAMES)


def with_own_targets(parts: Sequence[BatchPart]) -> list[BatchPart]:
    """Return the parts; sequences of tokens without targets are their own targets, as in language models."""
    return [
        BatchPart(part.inputs, part.inputs) if part.targets is None and _is_integer(part.inputs) else part
        for part in parts
    ]


def input_facts(parts: Sequence[BatchPart]) -> dict[str, float]:
    """Return mean, standard deviation and largest magnitude of floating-point inputs."""
    values = [_first_rows(part.inputs).float().flatten() for part in parts if part.inputs.is_floating_point()]
    if not values:
        return {}
    elements = torch.cat(values)
    deviation, mean = torch.std_mean(elements, correction=0)
    numbers = torch.stack([mean, deviation, elements.abs().max()]).tolist()
    return dict(zip(("input_mean", "input_std", "input_max_abs"), numbers, strict=True))


def target_facts(parts: Sequence[BatchPart], ignored: int = IGNORED) -> dict[str, float]:
    """Return the number of classes, the most frequent one with its share, and the shares of ignored and padded targets.

    Shares of classes are those among the targets that are not ignored.

    Args:
        parts: the micro-batches.
        ignored: the target that the loss leaves out.
    """
    targets = [_first_rows(part.targets) for part in parts if part.targets is not None and _is_integer(part.targets)]
    if not targets:
        return {}
    elements = torch.cat([target.flatten().long() for target in targets])
    counted = elements[elements != ignored]
    facts = {"ignored_target_fraction": 1 - len(counted) / len(elements)}
    if len(counted):
        classes, counts = class_counts(counted)
        top = int(counts.argmax())
        facts["target_class_count"] = len(counts)
        facts |= {"target_top": int(classes[top]), "target_top_fraction": int(counts[top]) / len(counted)}
    if all(target.ndim == 2 for target in targets):
        padded = sum(padded_count(target, ignored) for target in targets)
        facts["padding_fraction"] = padded / len(elements)
    return facts


def inside_facts(parts: Sequence[BatchPart], ignored: int) -> dict[str, float]:
    """Return the share of ignored targets that have others of their row on both sides.

    >>> inside_facts([BatchPart(torch.zeros(1, 5), torch.tensor([[4, 0, 3, 0, 0]]))], ignored=0)
    {'ignored_inside_fraction': 0.3333333333333333}
    """
    inside = total = 0
    for part in parts:
        if part.targets is None or part.targets.ndim != 2 or not _is_integer(part.targets):
            return {}
        is_counted = _first_rows(part.targets) != ignored
        has_before, has_after = is_counted.cumsum(1) > 0, is_counted.flip(1).cumsum(1).flip(1) > 0
        inside += int((~is_counted & has_before & has_after).sum())
        total += int((~is_counted).sum())
    return {"ignored_inside_fraction": inside / total} if total else {}


def end_facts(parts: Sequence[BatchPart]) -> dict[str, float]:
    """Return the share of rows whose last token within the mask is ignored, though the one before it is not.

    >>> row, mask = torch.tensor([[5, 6, -100, -100]]), torch.tensor([[1, 1, 1, 0]])
    >>> end_facts([BatchPart(torch.tensor([[5, 6, 2, 2]]), row, mask=mask)])
    {'ignored_end_fraction': 1.0}
    """
    shares = []
    for part in parts:
        targets, mask = part.targets, part.mask
        if targets is None or mask is None or targets.shape != mask.shape or mask.shape[1] < 2:
            continue
        last = (mask != 0).long().cumsum(1).argmax(1)
        ends, before = (targets.gather(1, place[:, None]).flatten() for place in (last, (last - 1).clamp(min=0)))
        shares.append(float(((ends == IGNORED) & (before != IGNORED)).double().mean()))
    return {"ignored_end_fraction": sum(shares) / len(shares)} if shares else {}


def class_counts(elements: Tensor) -> tuple[Tensor, Tensor]:
    """Return the classes that occur, ascending, and how often each of them does.

    >>> class_counts(torch.tensor([4, 0, 4]))
    (tensor([0, 4]), tensor([1, 2]))
    """
    smallest, largest = (int(value) for value in elements.aminmax())
    if smallest >= 0 and largest < MOST_BINS:
        counts = torch.bincount(elements)
        classes = counts.nonzero().flatten()
        return classes, counts[classes]
    classes, counts = torch.unique(elements, return_counts=True)
    return classes, counts


def padded_count(targets: Tensor, ignored: int = IGNORED) -> int:
    """Return the number of targets in trailing runs of padding, of a matrix with a row for each sequence.

    The padding is an id with which most rows end, and that hardly occurs elsewhere. A run has at least three equal ids;
    ids that the loss ignores are no padding here, and rows of zeros and ones are no sequences.

    >>> padded_count(torch.tensor([[5, 6, 9, 9, 9], [7, 9, 9, 9, 9], [1, 2, 3, 4, 9]]))
    7
    """
    last = targets[:, -1]
    ids, counts = torch.unique(last, return_counts=True)
    padding = ids[counts.argmax()]
    if int(padding) == ignored or 2 * int(counts.max()) <= len(last) or int(targets.max()) <= 1:
        return 0
    # the number of positions after which only the padding follows
    runs = (targets.flip(1) == padding).long().cumprod(dim=1).sum(dim=1)
    total = int((targets == padding).sum())
    if total - int(runs.sum()) > MOST_INSIDE * total:
        return 0
    return int(runs[runs >= LEAST_RUN].sum())


def _first_rows(tensor: Tensor) -> Tensor:
    """Return the first rows of a tensor, detached: as many as have about 2¹⁸ elements, but at least one."""
    row_size = max(1, tensor.numel() // len(tensor))
    return tensor.detach()[: max(1, MOST_ELEMENTS // row_size)]
