"""Resumed runs continue the counts of tokens and the drift of log Z."""

from pathlib import Path

import pytest
from loopscope.training_hooks.experts import MoeRouter
from loopscope.training_hooks.outputs import OutputLogits, TokenLoss

from tests.support import LOOPS, Case
from tests.training_hooks.interrupted import in_one_and_two

HOOKS = {
    "output_logits": lambda: OutputLogits(interval=1),
    "token_loss": lambda: TokenLoss(interval=1),
    "moe_router": lambda: MoeRouter(interval=1, routers="decoder", top_k=2, write_all=True),
}


@pytest.mark.some_rows(3)
@pytest.mark.longer
@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", HOOKS)
def test_resumed_hook_reports_the_same_numbers(name: str, loop: str, tmp_path: Path) -> None:
    """Every metric after the checkpoint is that of the uninterrupted run, bit for bit."""
    whole, resumed, middle = in_one_and_two(Case("tied", loop=loop), HOOKS[name], tmp_path)
    assert whole.after(middle)
    assert repr(resumed.after(middle)) == repr(whole.after(middle))
    assert resumed.final == whole.final
