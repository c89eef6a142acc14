"""What observers may ask for: forward passes that leave no trace, and the optimizer's settings as copies."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.firing.fire import forward_pass, optimizer_groups
from loopscope.hooks import HookPoint
from loopscope.state import RandomStreams, TrainingState
from torch import nn

from tests.support import MODELS, Case, SpyHook, assert_same_bytes, at, build, data_for, train
from tests.support.cases import matrix


def state_of(model: nn.Module) -> TrainingState:
    return TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), RandomStreams(0))


@matrix("model, train_mode, loop", MODELS, [False, True], ["epoch", "step"])
def test_a_forward_pass_at_every_point_leaves_every_byte_as_it_was(model, train_mode, loop):
    inputs = data_for(model)[0]
    outputs: list[torch.Tensor] = []
    look = SpyHook(lambda ctx: outputs.append(ctx.forward(inputs, train=train_mode).output))
    case = Case(model, loop=loop)
    assert_same_bytes(train(case, [look]), case)
    assert len(outputs) >= 12


@pytest.mark.parametrize("train_mode", [False, True])
def test_a_forward_pass_leaves_digest_and_module_hooks_alone_even_if_it_raises(train_mode):
    _, state = build(Case())
    before = state.digest()
    forward_pass(state, data_for("batchnorm_mlp")[0], ["1", "3"], train_mode)
    assert state.digest() == before
    with pytest.raises(RuntimeError):
        forward_pass(state, torch.ones(2, 99), ["1"], train_mode)
    assert state.digest() == before


def test_a_forward_pass_in_eval_mode_is_that_of_the_model_in_eval_mode():
    task, state = build(Case())
    inputs = data_for("batchnorm_mlp")[0]
    found = forward_pass(state, inputs, [], False).output
    assert not found.requires_grad
    assert torch.equal(found, task.model.eval()(inputs))


def test_in_train_mode_batches_are_normalised_by_themselves_and_dropout_draws():
    _, state = build(Case())
    inputs = data_for("batchnorm_mlp")[0]
    result = forward_pass(state, inputs, ["1", "3"], True)
    normalised = result.captured["1"]
    assert torch.allclose(normalised.mean(dim=0), torch.zeros(8), atol=1e-5)
    assert (result.captured["3"] == 0).sum() > (normalised.relu() == 0).sum()
    assert not torch.equal(result.output, forward_pass(state, inputs, [], False).output)


def test_an_observers_dropout_masks_depend_on_its_name_point_and_step_alone():
    inputs = data_for("batchnorm_mlp")[0]

    def outputs(*others) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        look = at(SpyHook, HookPoint.PRE_STEP)(lambda ctx: seen.append(ctx.forward(inputs, train=True).output))
        train(Case(), [*others, look])
        return seen

    other = at(SpyHook, HookPoint.PRE_STEP, name="other")(lambda ctx: {"x": torch.rand(())})
    assert all(map(torch.equal, outputs(), outputs(other)))


def test_captured_outputs_are_those_of_the_modules_before_a_later_one_writes_to_them():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    inputs = torch.randn(16, 3)
    captured = forward_pass(state_of(model), inputs, ["0", "1", "2", ""], False).captured
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


def test_several_inputs_are_passed_as_a_tuple_and_outputs_come_as_they_are():
    a, b = torch.ones(2), torch.zeros(3)
    result = forward_pass(TrainingState(Pair(), None, RandomStreams(0)), (a, b), ["inner", "alias"], False)
    assert result.output[0] is a
    assert result.output[1]["b"] is b
    assert torch.equal(result.captured["alias"], b)
    assert result.captured["inner"] is not b


def test_a_module_that_does_not_exist_is_answered_with_the_nearest_and_nothing_is_run():
    model = MODELS["tied"]()
    with pytest.raises(UsageError, match=r"Unknown module 'embeding'\. Did you mean 'embedding'"):
        forward_pass(state_of(model), None, ["embeding"], False)
    assert not model.embedding._forward_hooks


def test_what_is_captured_can_be_overwritten_without_reaching_the_model():
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
    forward_pass(state, torch.ones(1, 3), ["1"], False).captured["1"].zero_()
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
    rate = torch.tensor(0.1)
    (group,) = optimizer_groups(model, torch.optim.SGD(model.parameters(), lr=rate))
    assert group.betas is None
    group.options["lr"].zero_()
    assert rate == 0.1
    with pytest.raises(FrozenInstanceError):
        group.lr = 5.0
    with pytest.raises(TypeError):
        group.options["lr"] = 5.0


def test_a_context_shows_the_optimizers_groups_of_the_moment():
    seen: list[float] = []
    run = train(
        Case(), [at(SpyHook, HookPoint.PRE_EPOCH)(lambda ctx: seen.append(ctx.optimizer_groups[0].lr))], steps=6
    )
    assert seen[0] > seen[1] > run.task.optimizer.param_groups[0]["lr"]
