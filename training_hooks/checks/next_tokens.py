"""Whether the targets of a language model are its inputs or their next tokens."""

from collections.abc import Sequence

from loopscope.hooks import BackwardPass

from .batch_facts import BatchPart

LEAST_TOKENS = 3
"""Different tokens that a row needs so that it differs from the row of the next tokens."""


def token_facts(parts: Sequence[BatchPart], passes: Sequence[BackwardPass]) -> dict[str, int]:
    """Return whether the first targets of the loss are the first row of inputs, or its next tokens.

    Args:
        parts: inputs and targets of the micro-batches, whose own targets are not read.
        passes: the descriptions of the losses.

    >>> import torch
    >>> part = BatchPart(torch.tensor([[5, 6, 7, 8]]))
    >>> token_facts([part], [BackwardPass(first_targets=(6, 7, 8))])
    {'next_token_targets': 1, 'unshifted_targets': 0}
    """
    if not parts or not passes or not passes[0].first_targets:
        return {}
    inputs, targets = parts[0].inputs, passes[0].first_targets
    if inputs.ndim != 2 or inputs.is_floating_point():
        return {}
    row = tuple(inputs[0, : len(targets) + 1].tolist())
    if len({*row}) < LEAST_TOKENS:
        return {}
    count = len(row) - 1  # the loss may leave out the last position of each row
    return {
        "next_token_targets": int(targets[:count] == row[1:]),
        "unshifted_targets": int(targets[:count] == row[:-1]),
    }
