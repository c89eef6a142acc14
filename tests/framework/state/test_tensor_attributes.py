"""Attributes of parameters and buffers that a forward pass writes are protected, watched, digested and stored."""

from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.checkpoints.content import load_checkpoint, save_checkpoint
from loopscope.errors import StateMutationError
from loopscope.isolation import Call, Isolation, StateCopy, borrowed_weights, undone_in_modules
from loopscope.state import RandomStreams, TrainingState, differing
from torch import nn

OWNERS = {"parameter": "parameters/body.weight", "buffer": "buffers/scale"}
HOOKS = ["hessian", "lr_probe", "gradient_noise_scale", "sharpness", "variance"]


class Counting(nn.Module):
    """Counts its calls, and keeps a history, in attributes of a parameter or a buffer."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.body, self.owner = nn.Linear(4, 3), owner
        self.register_buffer("scale", torch.ones(1))
        self.target.calls, self.target.history = 0, [torch.zeros(1)]

    @property
    def target(self) -> Any:
        return self.body.weight if self.owner == "parameter" else self.scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.target.calls += 1
            self.target.history[0] += 1
        return self.body(inputs) * (1 + 0.01 * self.target.calls)


def state_of(owner: str) -> TrainingState:
    torch.manual_seed(0)
    model = Counting(owner)
    return TrainingState(model, torch.optim.SGD(model.parameters(), 0.1), RandomStreams(1))


def trained(owner: str, hooks: list[str], folder: Path) -> tuple[list[float], int, float]:
    state = state_of(owner)
    model: Any = state.model
    batches = [*torch.randn(24, 4).split(6)]
    loss = lambda model, batch: model(batch).square().mean()
    settings = {"loss": loss, "loader": batches, "out": folder, "overwrite": True, "display": "none"}
    scope = loopscope.attach(model, state.optimizer, hooks=hooks, **settings)
    for batch in scope.batches(batches):
        scope.backward(loss(model, batch))
        state.optimizer.step()
        state.optimizer.zero_grad()
    scope.close()
    return model.body.weight.flatten().tolist(), model.target.calls, model.target.history[0].item()


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("hook", HOOKS)
def test_passes_of_hooks_leave_attributes_of_tensors(hook: str, owner: str, tmp_path: Path) -> None:
    """The forward pass writes attributes of a tensor; weights and attributes equal those without hooks."""
    bare = trained(owner, [], tmp_path)
    assert bare[1:] == (4, 4.0)
    assert trained(owner, [hook], tmp_path) == bare


@pytest.mark.guarantee("observers-change-nothing", "interventions-are-undone")
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("change", [lambda item: setattr(item, "calls", 9), lambda item: item.history[0].add_(1)])
def test_changed_attribute_is_detected_and_undone(owner: str, change: Any) -> None:
    """The digest and the tripwire detect it, and a snapshot and a pass restore it."""
    state = state_of(owner)
    original, snapshot = state.digest(), StateCopy().save(state)
    change(state.model.target)
    assert [name.startswith(f"tensor attributes/{OWNERS[owner]}") for name in differing(original, state.digest())] == [
        True
    ]
    snapshot.restore(state)
    with undone_in_modules([state.model]):
        change(state.model.target)
    assert differing(original, state.digest()) == []
    isolation = Isolation(state)
    with pytest.raises(StateMutationError, match=OWNERS[owner]), isolation.visit():
        isolation.observe(Call("spy", "POST_STEP", 1), lambda: change(state.model.target))


@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("owner", OWNERS)
def test_attributes_of_tensors_are_stored(owner: str, tmp_path: Path) -> None:
    """A checkpoint contains them, and loading it restores them."""
    state, fresh = state_of(owner), state_of(owner)
    for _ in range(3):
        state.model(torch.ones(1, 4))
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    fresh.model.target.late = 5
    load_checkpoint(tmp_path / "a", fresh)
    assert (fresh.model.target.calls, fresh.model.target.history[0].item()) == (3, 3.0)
    assert differing(state.digest(), fresh.digest()) == []


def test_replaced_weights_keep_their_attributes() -> None:
    model = state_of("parameter").model
    with borrowed_weights(model, {"body.weight": torch.zeros(3, 4)}):
        model(torch.ones(1, 4))
        assert model.target.calls == 1
    assert model.target.calls == 0
