"""Loops of Lightning Fabric have the same bytes with hooks; attach takes Fabric's wrappers or the original objects."""

from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from tests.support import batchnorm_mlp, data_for, mean_loss

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")]
ATTACHED = {
    "both as returned by setup": lambda raw, wrapped: wrapped,
    "both as before setup": lambda raw, wrapped: raw,
    "wrapped model": lambda raw, wrapped: (wrapped[0], raw[1]),
    "wrapped optimizer": lambda raw, wrapped: (raw[0], wrapped[1]),
}


def train(choose: Any, out: Path, clips: bool = False, accumulate: int = 1) -> list[Tensor]:
    """Train four batches, with hooks unless ``choose`` is None, and return the state after every step."""
    torch.manual_seed(3)
    fabric = Fabric(accelerator="cpu", devices=1)
    raw = batchnorm_mlp(), None
    raw = raw[0], torch.optim.AdamW(raw[0].parameters(), 1e-2)
    wrapped = fabric.setup(*raw)
    rows = [[part[start : start + 4] for part in data_for("batchnorm_mlp")] for start in range(0, 16, 4)]
    hooks = ["training_metrics", "norms", "weight_updates", "hessian"] if accumulate == 1 else ["norms"]
    options: dict[str, Any] = {"hooks": hooks, "loss": mean_loss, "accumulate": accumulate, "out": out}
    scope = None if choose is None else loopscope.attach(*choose(raw, wrapped), **options, display="none")
    steps = []
    for index, batch in enumerate(rows if scope is None else scope.batches(rows), start=1):
        loss = mean_loss(wrapped[0], batch)
        fabric.backward(loss) if scope is None else scope.backward(loss)
        if index % accumulate == 0:
            if clips:
                fabric.clip_gradients(*wrapped, max_norm=0.1)
            wrapped[1].step()
            wrapped[1].zero_grad()
            steps += [tensor.clone() for tensor in (*raw[0].state_dict().values(), torch.get_rng_state())]
    if scope is not None:
        scope.close()
    return steps


@pytest.mark.some_rows(2)
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("changed", [{}, {"clips": True}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("given", ATTACHED)
def test_hooks_leave_a_fabric_loop_unchanged(given: str, changed: dict[str, Any], tmp_path: Path) -> None:
    """The loop has equal bytes at every step, whether attach is given Fabric's wrappers or the original objects."""
    bare, hooked = (train(choose, tmp_path / "run", **changed) for choose in (None, ATTACHED[given]))
    assert len(bare) == len(hooked) > 0
    assert all(torch.equal(one, other) for one, other in zip(bare, hooked, strict=True))


def test_names_are_those_of_the_original_model(tmp_path: Path) -> None:
    """No name in the record contains the wrapper's attribute."""
    train(ATTACHED["both as returned by setup"], tmp_path / "run")
    text = (tmp_path / "run" / "run.jsonl").read_text(encoding="utf-8")
    assert "_forward_module" not in text
    assert '"norms/' in text


def test_plain_model_and_optimizer_are_no_wrappers(tmp_path: Path) -> None:
    """They are attached as they are, although Fabric has been imported."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with loopscope.attach(model, optimizer, hooks=["norms"], out=tmp_path / "run", display="none") as scope:
        scope.backward(model(next(scope.batches([torch.ones(3, 2)]))).sum())
        optimizer.step()
    assert scope.hooks == ["training_metrics", "norms"]
