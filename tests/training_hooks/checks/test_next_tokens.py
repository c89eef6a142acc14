"""Targets that are the next tokens of their inputs, the inputs themselves, or something else."""

import pytest
import torch
from loopscope.hooks import BackwardPass
from loopscope.training_hooks.checks.batch_facts import BatchPart
from loopscope.training_hooks.checks.next_tokens import token_facts
from torch import Tensor

TOKENS = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(0))
PADDED = torch.cat([TOKENS[:, 1:], torch.full((4, 1), -100)], dim=1)
NEXT, SAME, OTHER = (1, 0), (0, 1), (0, 0)


@pytest.mark.parametrize("length", [9, 64])
@pytest.mark.parametrize(
    ("inputs", "targets", "expected"),
    [
        (TOKENS[:, :-1], TOKENS[:, 1:], NEXT),
        (TOKENS, TOKENS[:, 1:], NEXT),
        (TOKENS, PADDED, NEXT),
        (TOKENS, TOKENS, SAME),
        (TOKENS, TOKENS.flip(1), OTHER),
        (TOKENS, TOKENS.masked_fill(TOKENS % 5 > 0, -100), OTHER),
        (TOKENS, TOKENS[:, :-1], SAME),
    ],
)
def test_targets_are_compared_with_inputs(inputs: Tensor, targets: Tensor, expected: tuple, length: int) -> None:
    passes = [BackwardPass(first_targets=tuple(targets.flatten()[:length].tolist()))]
    facts = token_facts([BatchPart(inputs)], passes)
    assert (facts["next_token_targets"], facts["unshifted_targets"]) == expected


@pytest.mark.parametrize(
    "inputs", [TOKENS.float(), TOKENS[:, 0], torch.zeros(4, 9, dtype=torch.int64)], ids=["floats", "vector", "constant"]
)
def test_other_inputs_have_no_facts(inputs: Tensor) -> None:
    assert token_facts([BatchPart(inputs)], [BackwardPass(first_targets=(1, 2, 3))]) == {}


def test_unknown_targets_have_no_facts() -> None:
    assert token_facts([BatchPart(TOKENS)], [BackwardPass()]) == {}
    assert token_facts([BatchPart(TOKENS)], []) == {}
    assert token_facts([], [BackwardPass(first_targets=(1, 2))]) == {}
