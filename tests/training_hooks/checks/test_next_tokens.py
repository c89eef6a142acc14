"""Targets that are the next tokens of their inputs, and targets that are not."""

import pytest
import torch
from loopscope.hooks import BackwardPass
from loopscope.training_hooks.checks.batch_facts import BatchPart
from loopscope.training_hooks.checks.next_tokens import predicts_next_tokens

ROWS, LENGTH = 4, 9
TOKENS = torch.randint(50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
ALL, SHIFTED = ROWS * LENGTH, ROWS * (LENGTH - 1)


@pytest.mark.parametrize(
    ("inputs", "targets", "count", "expected"),
    [
        (TOKENS[:, :-1], TOKENS[:, 1:], SHIFTED, True),
        (TOKENS, TOKENS, SHIFTED, True),
        (TOKENS, None, SHIFTED, True),
        (TOKENS, TOKENS, ALL, False),
        (TOKENS, None, ALL, False),
        (TOKENS, None, 5, False),
        (TOKENS, TOKENS.flip(1), ALL, False),
        (TOKENS, TOKENS[:, 0], ROWS, False),
        (TOKENS.float(), TOKENS, SHIFTED, False),
        (TOKENS[:, 0], None, ROWS, False),
    ],
)
def test_shifted_targets_are_next_tokens(
    inputs: torch.Tensor, targets: torch.Tensor | None, count: int, expected: bool
) -> None:
    passes = [BackwardPass(class_count=50, target_count=count)]
    assert predicts_next_tokens([BatchPart(inputs, targets)], passes) is expected


def test_losses_without_classes_predict_no_tokens() -> None:
    part = BatchPart(TOKENS, None)
    assert not predicts_next_tokens([part], [BackwardPass(target_count=SHIFTED)])
    assert not predicts_next_tokens([part], [])
    assert not predicts_next_tokens([], [BackwardPass(class_count=50)])
