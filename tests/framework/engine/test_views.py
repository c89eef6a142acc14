"""Services of the observer context: forward passes without side effects, and copies of the optimizer's settings."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from loopscope.engine.hook_calls import forward_pass, optimizer_groups
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint
from loopscope.state import RandomStreams, TrainingState
from torch import nn

from tests.support import MODELS, Case, SpyHook, assert_same_bytes, at, build, data_for, train
from tests.support.cases import matrix


def state_of(model: nn.Module) -> TrainingState:
    return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), RandomStreams(0))


@pytest.mark.guarantee("observers-change-nothing")
@matrix("model, train_mode, loop", MODELS, [False, True], ["epoch", "step"])
def test_forward_pass_leaves_run_unchanged(model, train_mode, loop):
    """An observer runs a forward pass at every hook point, in both modes, for every model and loop."""
    inputs = data_for(model)[0]
    outputs: list[torch.Tensor] = []
    look = SpyHook(lambda ctx: outputs.append(ctx.forward(inputs, train=train_mode).output))
    case = Case(model, loop=loop)
    assert_same_bytes(train(case, [look]), case)
    assert len(outputs) >= 12


@pytest.mark.parametrize("train_mode", [False, True])
def test_forward_pass_restores_state_and_module_hooks(train_mode):
    """The state digest is the same afterwards, even if the pass raises."""
    _, state = build(Case())
    before = state.digest()
    forward_pass(state, data_for("batchnorm_mlp")[0], ["1", "3"], train=train_mode)
    assert state.digest() == before
    with pytest.raises(RuntimeError):
        forward_pass(state, torch.ones(2, 99), ["1"], train=train_mode)
    assert state.digest() == before


def test_eval_forward_pass_matches_eval_model():
    """The output requires no gradient."""
    task, state = build(Case())
    inputs = data_for("batchnorm_mlp")[0]
    output = forward_pass(state, inputs, [], train=False).output
    assert not output.requires_grad
    assert torch.equal(output, task.model.eval()(inputs))


def test_train_forward_pass_uses_batchnorm_and_dropout():
    """Batch norm uses the statistics of the batch, and dropout zeroes activations."""
    _, state = build(Case())
    inputs = data_for("batchnorm_mlp")[0]
    result = forward_pass(state, inputs, ["1", "3"], train=True)
    normalised = result.captured["1"]
    assert torch.allclose(normalised.mean(dim=0), torch.zeros(8), atol=1e-5)
    assert (result.captured["3"] == 0).sum() > (normalised.relu() == 0).sum()
    assert not torch.equal(result.output, forward_pass(state, inputs, [], train=False).output)


def test_dropout_masks_ignore_other_hooks():
    """An observer's masks depend only on its name, the hook point and the step."""
    inputs = data_for("batchnorm_mlp")[0]

    def outputs(*others) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        look = at(SpyHook, HookPoint.PRE_STEP)(lambda ctx: seen.append(ctx.forward(inputs, train=True).output))
        train(Case(), [*others, look])
        return seen

    other = at(SpyHook, HookPoint.PRE_STEP, name="other")(lambda ctx: {"x": torch.rand(())})
    assert all(map(torch.equal, outputs(), outputs(other)))


def test_captured_outputs_survive_inplace_modules():
    """Each captured output is that of its module, before a later module writes to it in place."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    inputs = torch.randn(16, 3)
    captured = forward_pass(state_of(model), inputs, ["0", "1", "2", ""], train=False).captured
    with torch.no_grad():
        linear = model[0](inputs)
        assert torch.equal(captured["0"], linear)
        assert (captured["0"] < 0).any()
        assert torch.equal(captured["1"], linear.relu())
        assert torch.equal(captured["2"], model(inputs))
    assert torch.equal(captured["2"], captured[""])


class Pair(nn.Module):
    """Takes two inputs and returns a tuple and a mapping."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.alias = self.inner

    def forward(self, a, b):
        return self.inner(a), {"b": self.inner(b)}


def test_input_tuple_and_outputs_pass_through():
    """The model receives several inputs as a tuple, and a structured output is returned as it is."""
    a, b = torch.ones(2), torch.zeros(3)
    result = forward_pass(TrainingState(Pair(), None, RandomStreams(0)), (a, b), ["inner", "alias"], train=False)
    assert result.output[0] is a
    assert result.output[1]["b"] is b
    assert torch.equal(result.captured["alias"], b)
    assert result.captured["inner"] is not b


def test_unknown_module_name_suggests_nearest():
    """The error is raised before the model runs or gets a forward hook."""
    model = MODELS["tied"]()
    with pytest.raises(UsageError, match=r"Unknown module 'embeding'\. Did you mean 'embedding'"):
        forward_pass(state_of(model), None, ["embeding"], train=False)
    assert not model.embedding._forward_hooks


def test_overwriting_captured_output_leaves_model_unchanged():
    """The captured tensor is a copy, even if a module returns its parameter."""
    model = nn.Sequential(nn.Linear(3, 4))
    state = state_of(model)

    class Showing(nn.Module):
        def __init__(self, parameter):
            super().__init__()
            self.parameter = parameter

        def forward(self, x):
            return self.parameter

    model.append(Showing(model[0].weight))
    before = state.digest()
    forward_pass(state, torch.ones(1, 3), ["1"], train=False).captured["1"].zero_()
    assert state.digest() == before


def test_optimizer_groups_are_copies_with_names_and_settings():
    model = MODELS["tied"]()
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.embedding.weight], "lr": 0.5, "weight_decay": 0.0},
            {"params": model.mix.parameters(), "betas": (0.8, 0.9)},
        ],
        lr=0.1,
        weight_decay=0.2,
    )
    first, second = optimizer_groups(model, optimizer)
    assert (first.names, first.lr, first.weight_decay) == (("embedding.weight",), 0.5, 0.0)
    assert (second.names, second.lr, second.betas) == (("mix.weight", "mix.bias"), 0.1, (0.8, 0.9))
    assert second.weight_decay == 0.2
    optimizer.param_groups[0]["lr"] = 9.0
    assert first.lr == first.options["lr"] == 0.5


def test_optimizer_groups_cannot_be_written_to():
    model = nn.Linear(2, 2)
    learning_rate = torch.tensor(0.1)
    (group,) = optimizer_groups(model, torch.optim.SGD(model.parameters(), lr=learning_rate))
    assert group.betas is None
    group.options["lr"].zero_()
    assert learning_rate == 0.1
    with pytest.raises(FrozenInstanceError):
        group.lr = 5.0
    with pytest.raises(TypeError):
        group.options["lr"] = 5.0


def test_context_shows_current_optimizer_groups():
    """The learning rate in the context follows the scheduler from epoch to epoch."""
    seen: list[float] = []
    run = train(
        Case(), [at(SpyHook, HookPoint.PRE_EPOCH)(lambda ctx: seen.append(ctx.optimizer_groups[0].lr))], steps=6
    )
    assert seen[0] > seen[1] > run.task.optimizer.param_groups[0]["lr"]
