"""By how many positions the targets of a language model are shifted against its inputs."""

from collections.abc import Sequence

from loopscope.hooks import BackwardPass

from .batch_facts import BatchPart

LEAST_TOKENS = 3
"""Different targets that a row needs, so that one shift differs from another."""
SHIFTS = (1, 0, 2)
"""The shifts that are tried: next tokens, the inputs themselves, and a shift by the data and by the model."""


def token_facts(parts: Sequence[BatchPart], passes: Sequence[BackwardPass]) -> dict[str, int]:
    """Return by how many positions the first targets of the loss are shifted against the first row of inputs.

    Nothing is returned if no shift of at most two positions fits.

    Args:
        parts: inputs and targets of the micro-batches, whose own targets are not read.
        passes: the descriptions of the losses.

    >>> import torch
    >>> token_facts([BatchPart(torch.tensor([[5, 6, 7, 8, 9]]))], [BackwardPass(first_targets=(6, 7, 8, 9))])
    {'target_shift': 1}
    """
    if not parts or not passes or not passes[0].first_targets:
        return {}
    inputs, targets = parts[0].inputs, passes[0].first_targets
    if inputs.ndim != 2 or inputs.is_floating_point():
        return {}
    row = tuple(inputs[0, : len(targets) + 1].tolist())
    # The loss may leave out the last positions of each row, and ignores padding.
    compared = [
        (position, target)
        for position, target in enumerate(targets[: len(row) - max(SHIFTS)])
        if target != passes[0].ignore_index
    ]
    if len({target for _, target in compared}) < LEAST_TOKENS:
        return {}
    fitting = (shift for shift in SHIFTS if all(row[position + shift] == target for position, target in compared))
    shift = next(fitting, None)
    return {} if shift is None else {"target_shift": shift}
