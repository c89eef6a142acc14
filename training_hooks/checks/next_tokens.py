"""By how many positions the targets of a language model are shifted against its inputs."""

from collections.abc import Sequence

from loopscope.doctor.senses import BackwardPass
from torch import Tensor

from .batch_facts import BatchPart

LEAST_TOKENS = 3
"""Different targets that a row needs, so that one shift differs from another."""
SHIFTS = (1, 0, 2)
"""The shifts that are tried: next tokens, the inputs themselves, and a shift by the data and by the model."""


def token_facts(parts: Sequence[BatchPart], passes: Sequence[BackwardPass]) -> dict[str, int]:
    """Return by how many positions the first targets of the loss are shifted against the first row of inputs.

    The inputs are those of the model, or of its decoder. The targets of the batch can be the decoder's inputs, too:
    in ``model(source, target[:, :-1])``, the loss gets ``target[:, 1:]``. Nothing is returned if no shift of at most
    two positions fits.

    Args:
        parts: inputs and targets of the micro-batches.
        passes: the descriptions of the losses.

    >>> import torch
    >>> token_facts([BatchPart(torch.tensor([[5, 6, 7, 8, 9]]))], [BackwardPass(first_targets=(6, 7, 8, 9))])
    {'target_shift': 1}
    """
    if not parts or not passes or not passes[0].first_targets or parts[0].inputs.is_floating_point():
        return {}
    part, targets, ignored = parts[0], passes[0].first_targets, passes[0].ignore_index
    shift = None
    for tokens, shifts in ((part.inputs, SHIFTS), (part.decoder_inputs, SHIFTS), (part.targets, (1,))):
        if shift is None and tokens is not None and tokens.ndim == 2 and not tokens.is_floating_point():
            shift = _shift(tokens[0], targets, ignored, shifts)
    return {} if shift is None else {"target_shift": shift}


def _shift(tokens: Tensor, targets: Sequence[int], ignored: int, shifts: Sequence[int]) -> int | None:
    """Return the first of the shifts by which targets fit the tokens of a row; ``None`` if none does."""
    row = tuple(tokens[: len(targets) + 1].tolist())
    # The loss may leave out the last positions of each row, and ignores padding.
    compared = [
        (position, target) for position, target in enumerate(targets[: len(row) - max(SHIFTS)]) if target != ignored
    ]
    if len({target for _, target in compared}) < LEAST_TOKENS:
        return None
    return next((by for by in shifts if all(row[position + by] == target for position, target in compared)), None)
