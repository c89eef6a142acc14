"""Targets that are the next tokens of their inputs, the inputs themselves, or something else."""

import pytest
import torch
from loopscope.doctor.senses import BackwardPass
from loopscope.training_hooks.checks.batch_facts import BatchPart
from loopscope.training_hooks.checks.next_tokens import token_facts
from torch import Tensor

TOKENS = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(0))


def padded(targets: Tensor) -> Tensor:
    """Return targets of the same length as the inputs, the last ones of which the loss ignores."""
    return torch.cat([targets, torch.full((4, 9 - targets.shape[1]), -100)], dim=1)


@pytest.mark.parametrize("length", [9, 64])
@pytest.mark.parametrize(
    ("inputs", "targets", "expected"),
    [
        (TOKENS[:, :-1], TOKENS[:, 1:], 1),
        (TOKENS, TOKENS[:, 1:], 1),
        (TOKENS, padded(TOKENS[:, 1:]), 1),
        (TOKENS, TOKENS, 0),
        (TOKENS, TOKENS[:, :-1], 0),
        (TOKENS, padded(TOKENS[:, 2:]), 2),
        (TOKENS[:, :-1], TOKENS[:, 2:], 2),
        (TOKENS, padded(TOKENS[:, 1:5]), 1),
        (TOKENS, padded(TOKENS[:, 2:6]), 2),
        (TOKENS, padded(TOKENS[:, 1:2]), None),
        (TOKENS, TOKENS.flip(1), None),
        (TOKENS, TOKENS.flip(1).masked_fill(TOKENS % 5 > 3, -100), None),
    ],
)
def test_shift_of_targets_is_found(inputs: Tensor, targets: Tensor, expected: int | None, length: int) -> None:
    passes = [BackwardPass(first_targets=tuple(targets.flatten()[:length].tolist()))]
    assert token_facts([BatchPart(inputs)], passes).get("target_shift") == expected


SOURCE = TOKENS.flip(0)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (BatchPart(SOURCE, TOKENS), 1),
        (BatchPart(SOURCE, TOKENS[:, 1:]), None),
        (BatchPart(SOURCE, TOKENS[:, 1:], TOKENS[:, :-1]), 1),
        (BatchPart(SOURCE, TOKENS[:, 1:], TOKENS[:, 1:]), 0),
        (BatchPart(SOURCE.float(), TOKENS), None),
    ],
    ids=["the batch shifts itself", "labels", "decoder", "decoder gets the answer", "other inputs"],
)
def test_shift_against_inputs_of_a_decoder(part: BatchPart, expected: int | None) -> None:
    """Labels that are the targets themselves show nothing, since the decoder gets others."""
    passes = [BackwardPass(first_targets=tuple(TOKENS[:, 1:].flatten()[:64].tolist()))]
    assert token_facts([part], passes).get("target_shift") == expected


@pytest.mark.parametrize(
    "inputs", [TOKENS.float(), TOKENS[:, 0], torch.zeros(4, 9, dtype=torch.int64)], ids=["floats", "vector", "constant"]
)
def test_other_inputs_have_no_facts(inputs: Tensor) -> None:
    assert token_facts([BatchPart(inputs)], [BackwardPass(first_targets=(1, 2, 3))]) == {}


def test_unknown_targets_have_no_facts() -> None:
    assert token_facts([BatchPart(TOKENS)], [BackwardPass()]) == {}
    assert token_facts([BatchPart(TOKENS)], []) == {}
    assert token_facts([], [BackwardPass(first_targets=(1, 2))]) == {}
