"""Forward taps: they read every use of a module in the training passes, once, and have no other effects."""

import random

import pytest
import torch
from loopscope.errors import StateMutationError, UsageError
from loopscope.hooks import ForwardCall, ForwardTap, HookPoint, TapOwner, TrainingHook
from loopscope.taps import TapSet
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import Case, bare_run, differences, train

CASES = [Case("batchnorm_mlp"), Case("tied"), Case("transformer", loop="step")]
MODULES = {"batchnorm_mlp": "0", "tied": "mix", "transformer": "embedding"}


class Reader(TrainingHook):
    """An observer with forward taps."""

    name = "reader"
    hook_points = frozenset({HookPoint.POST_BACKWARD})

    def __init__(self, *taps: ForwardTap) -> None:
        self._taps = taps

    def compute(self, ctx):
        return {}

    def taps(self, model):
        return self._taps


class Net(nn.Module):
    """Three layers, of which checkpointing recomputes the second; the third takes a keyword argument."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), Scale()
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        x = self.second(x) if self.reentrant is None else checkpoint(self.second, x, use_reentrant=self.reentrant)
        return self.scale(x, by=torch.tensor(2.0))


class Scale(nn.Module):
    """Returns a dict."""

    def forward(self, x, *, by):
        return {"scaled": x * by}


def attach(model: nn.Module, *targets: str, audit: bool = False) -> list[tuple[str, ForwardCall]]:
    """Attach a tap to every target, and return the list to which they append their calls."""
    calls: list[tuple[str, ForwardCall]] = []
    owner = TapOwner("reader", lambda: True, lambda target, function: function(), False)
    taps = [ForwardTap(target, lambda call, target=target: calls.append((target, call))) for target in targets]
    TapSet(model, audit=audit).attach(owner, taps)
    return calls


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_recomputed_modules_are_read_once(reentrant):
    """Checkpointing of either kind calls the second layer twice, of which one is a use."""
    model = Net(reentrant)
    calls = attach(model, "", "first", "second", "scale")
    model(torch.ones(2, 4))["scaled"].sum().backward()
    assert [target for target, _ in calls] == ["first", "second", "scale", ""]


def test_calls_have_detached_inputs_and_outputs():
    """The graph of the pass is not kept alive, and keyword arguments and containers are read."""
    torch.manual_seed(0)
    model = Net()
    calls = attach(model, "first", "scale")
    output = model(torch.ones(2, 4))
    first, scale = (call for _, call in calls[:2])
    assert torch.equal(first.output, model.first(torch.ones(2, 4)))
    assert torch.equal(scale.output["scaled"], output["scaled"])
    assert scale.kwargs["by"] == 2
    assert not any(tensor.requires_grad for tensor in (first.output, *scale.args, scale.output["scaled"]))


@pytest.mark.parametrize("untracked", [torch.no_grad, torch.inference_mode])
def test_passes_without_gradients_are_not_read(untracked):
    """A validation between two steps of a script is not part of the training."""
    model = Net()
    calls = attach(model, "first")
    with untracked():
        model(torch.ones(2, 4))
    assert calls == []


@pytest.mark.longer
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reading_and_drawing_taps_change_nothing(case):
    """The tap draws random numbers; the run equals the bare run at every step, and no module hook remains."""
    seen = []

    def read(call: ForwardCall) -> None:
        seen.append(call.output)
        torch.rand(3)
        random.random()

    run = train(case, [Reader(ForwardTap(MODULES[case.model], read), ForwardTap("", read))], audit=True)
    digests, final = bare_run(case)
    for expected, digest in zip(digests, run.digests, strict=True):
        assert not differences(expected, digest)
    assert not differences(final, run.final)
    assert len(seen) == 6
    assert not any(module._forward_hooks for module in run.task.model.modules())


@pytest.mark.longer
def test_micro_batches_are_read_one_by_one():
    """Three steps of two micro-batches are six uses."""
    seen = []
    train(Case("tied"), [Reader(ForwardTap("mix", seen.append))], steps=3, accumulation_steps=2, audit=True)
    assert len(seen) == 6


def write_output(call: ForwardCall) -> None:
    call.output.mul_(2)


def write_input(call: ForwardCall) -> None:
    call.args[0].zero_()


def write_and_raise(call: ForwardCall) -> None:
    call.output.zero_()
    raise ValueError


@pytest.mark.guarantee("commits-are-declared")
@pytest.mark.parametrize("mutation", [write_output, write_input, write_and_raise])
def test_changed_tensors_are_caught(mutation):
    """A tap only reads, and its hook is named."""
    run = train(Case(), [Reader(ForwardTap("1", mutation))], audit=False, raises=StateMutationError)
    assert "The tap of hook 'reader' on '1' changed an input or output" in str(run.error)


@pytest.mark.guarantee("commits-are-declared")
def test_audit_catches_writes_through_data():
    """Such a write changes no version counter."""
    tap = ForwardTap("1", lambda call: call.output.data.zero_())
    run = train(Case(), [Reader(tap)], raises=StateMutationError, audit=True)
    assert "changed an input or output" in str(run.error)


def test_unknown_module_is_refused():
    with pytest.raises(UsageError, match=r"Unknown module 'nine'"):
        attach(Net(), "nine")
