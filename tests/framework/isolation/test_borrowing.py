from contextlib import suppress

import pytest
import torch
from loopscope.errors import LoopscopeError, UsageError
from loopscope.hooks import HookPoint
from loopscope.isolation import borrowed_gradients, borrowed_modes, borrowed_weights, undone_in_modules
from loopscope.isolation.tripwire import Audit
from torch import nn

from tests.support import LOOPS, MODELS, TOKENS, Case, Mishap, SpyHook, TiedModel, at, batchnorm_mlp, build, train
from tests.support.misbehaving_hooks import Scene, train_one_step


class Remembering(nn.Module):
    """A module that keeps its last output and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.last = self.norm(x)
        return self.last


@pytest.mark.parametrize("raises", [False, True])
def test_undone_pass_restores_buffers_and_attributes(raises):
    """A forward pass leaves no trace, even if the body raises."""
    model = Remembering()
    table, buffers = model._buffers, dict(model.norm._buffers)
    with suppress(Mishap), undone_in_modules([model]):
        model(torch.randn(3, 4))
        assert model.calls == 1
        assert model.norm.num_batches_tracked == 1
        if raises:
            raise Mishap
    assert model.calls == 0
    assert "last" not in vars(model)
    assert model._buffers is table
    assert all(model.norm._buffers[name] is buffer for name, buffer in buffers.items())
    assert model.norm.num_batches_tracked == 0


def test_shared_buffer_stays_shared_while_borrowed():
    """The original tensor keeps its values."""
    first, second = nn.Module(), nn.Module()
    shared = torch.zeros(2)
    first.register_buffer("shared", shared)
    second.register_buffer("shared", shared)
    with undone_in_modules([nn.ModuleList([first, second])]):
        first.shared.add_(1)
        assert second.shared.tolist() == [1, 1]
    assert first.shared is second.shared is shared
    assert shared.tolist() == [0, 0]


@pytest.mark.parametrize("train", [True, False])
def test_training_modes_are_restored_per_module(train):
    """This holds after an error and for a module that was in eval mode."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.Dropout())
    model[1].eval()
    with suppress(Mishap), borrowed_modes(model, train=train):
        assert [module.training for module in model] == [train] * 3
        model.train()
        raise Mishap
    assert [module.training for module in model] == [True, False, True]


def test_gradients_are_restored_as_the_same_tensors():
    """Within the context gradients are None, and missing ones are None again afterwards."""
    model = nn.Linear(2, 1)
    model(torch.ones(2)).backward()
    model.bias.grad = None
    gradient = model.weight.grad
    with suppress(Mishap), borrowed_gradients(model):
        assert model.weight.grad is None
        model(torch.ones(2)).backward()
        raise Mishap
    assert model.weight.grad is gradient
    assert model.bias.grad is None
    assert gradient.tolist() == [[1, 1]]


@pytest.mark.parametrize("model", ["batchnorm_mlp", "transformer", "tied"])
def test_borrowed_pass_passes_the_audit(model):
    """A forward and a backward pass with borrowed buffers, modes and gradients change no state."""
    task, state = build(Case(model))
    scene = Scene(task, state)
    train_one_step(scene)
    audit = Audit(state, enabled=True)
    audit.take_baseline()
    with (
        state.streams.preserved(),
        undone_in_modules([task.model]),
        borrowed_modes(task.model, train=True),
        borrowed_gradients(task.model),
    ):
        task.compute_loss(task.model, scene.batch).backward()
    audit.check("The caller")


@pytest.mark.parametrize("raises", [False, True])
def test_borrowed_weights_cover_tied_names_and_are_restored(raises):
    """The live parameter comes back unchanged under both names, even if the body raises."""
    model = TiedModel()
    live, table, order = model.embedding.weight, model.decoder._parameters, list(model.state_dict())
    version, other = live._version, torch.ones_like(live, dtype=torch.float64)
    with suppress(Mishap), borrowed_weights(model, {"embedding.weight": other}):
        assert model.decoder.weight is model.embedding.weight
        assert torch.equal(model.decoder.weight, torch.ones_like(live))
        if raises:
            raise Mishap
    assert model.decoder.weight is model.embedding.weight is live
    assert (model.decoder._parameters, list(model.state_dict())) == (table, order)
    assert live._version == version


@torch.no_grad()
@pytest.mark.parametrize("build_model", [batchnorm_mlp, lambda: nn.LSTM(4, 3)], ids=["batchnorm", "lstm"])
def test_borrowed_weights_compute_like_loaded_weights(build_model):
    """Outputs match those of a model that loaded the weights, and afterwards those of the live weights."""
    model, other, inputs = build_model(), build_model(), torch.randn(5, 4)
    for buffer in other.buffers():
        buffer.add_(1)
    original = model.eval()(inputs)
    with undone_in_modules([model]), borrowed_modes(model, train=False), borrowed_weights(model, other.state_dict()):
        borrowed = model(inputs)
    loaded, again = other.eval()(inputs), model(inputs)
    for outputs in ((loaded, borrowed), (original, again)):
        assert torch.equal(*(output[0] if isinstance(output, tuple) else output for output in outputs))


def test_mismatched_weights_are_refused_before_borrowing():
    """An unknown name and a wrong shape are each named in the error."""
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=r"Unknown weight 'weigth'\. Did you mean 'weight'"):
        borrowed_weights(model, {"weigth": torch.ones(1, 2)}).__enter__()
    with pytest.raises(LoopscopeError, match=r"'weight' has shape \(2,\), but the model's weight has \(1, 2\)"):
        borrowed_weights(model, {"weight": torch.ones(2)}).__enter__()


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("case", [Case(model, loop=loop) for loop in LOOPS for model in MODELS], ids=str)
def test_observer_may_evaluate_other_weights(case):
    """The evaluation of the live weights matches that of the run, and the run keeps its bytes."""
    evaluations = []

    def probe(ctx):
        if ctx.evaluation:
            doubled = {name: 2 * value for name, value in ctx.model.named_parameters()}
            evaluations.append((ctx.evaluate({}), dict(ctx.evaluation), ctx.evaluate(doubled)))

    run = train(case, [at(SpyHook, HookPoint.SNAPSHOT)(probe)], steps=6, evaluate=first_logit, audit=True)
    assert run.digests == train(case, steps=6, evaluate=first_logit, audit=False).digests
    assert len(evaluations) >= 1
    for live, of_run, doubled in evaluations:
        assert live == of_run
        assert doubled != live


def first_logit(model: nn.Module) -> dict[str, float]:
    """Evaluate on one row drawn at random."""
    inputs = torch.rand(1, 4) if isinstance(model, nn.Sequential) else torch.randint(TOKENS, (1, 2))
    assert not model.training
    return {"first": model(inputs)[0, 0].item()}
