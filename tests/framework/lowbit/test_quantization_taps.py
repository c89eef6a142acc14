"""Taps on quantisers receive the counts of the training step; taps on inputs receive the inputs of modules."""

import copy

import pytest
import torch
from loopscope.errors import StateMutationError, UsageError
from loopscope.hooks import GradientTap, QuantizationTap, Tap, TapOwner
from loopscope.lowbit import BitLinear, quantize_model, quantized_modules
from loopscope.lowbit.casts import Counts, QuantizationListener
from loopscope.taps import TapSet
from torch import Tensor, nn

OWNER = TapOwner("tapper", lambda: True, lambda target, function: function(), may_replace=False)


def quantised() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
    quantize_model(model, "e2m1/nvfp4", exclude=("2",))
    return model


def attached(model: nn.Module, *taps: Tap, owner: TapOwner = OWNER) -> TapSet:
    taps_of_model = TapSet(model)
    taps_of_model.attach(owner, taps)
    return taps_of_model


def step(model: nn.Module, rows: int = 8) -> None:
    torch.manual_seed(1)
    model(torch.randn(rows, 32)).square().sum().backward()


def elements(counts: dict[str, Counts]) -> dict[str, int]:
    return {role: int(found.by_name()["total_elements"]) for role, found in counts.items()}


def test_quantizing_modules_are_found_by_capability():
    """Modules are recognized by what they can do, not by their class."""
    assert quantized_modules(quantised()) == ["0"]
    assert quantized_modules(nn.Linear(2, 2)) == []


def test_counts_add_up_until_their_owner_clears_them():
    counts: dict[str, Counts] = {}
    model = quantised()
    attached(model, QuantizationTap("0", counts))
    step(model)
    once = elements(counts)
    assert once == {"forward_input": 256, "forward_weight": 512, "backward_input": 256, "output_grad": 128}
    step(model)
    assert elements(counts) == {role: 2 * count for role, count in once.items()}
    counts.clear()
    step(model)
    assert elements(counts) == once


def test_two_listeners_have_separate_counts():
    first, second = {}, {}
    model = quantised()
    attached(model, QuantizationTap("0", first), QuantizationTap("0", second))
    step(model)
    first["output_grad"].sums.zero_()
    assert elements(second)["output_grad"] == 128


def test_inactive_taps_count_nothing():
    """Silenced, idle and removed taps count nothing, and removal leaves no hook on the layer."""
    counts: dict[str, Counts] = {}
    model = quantised()
    idle = attached(model, QuantizationTap("0", counts), owner=TapOwner("idle", lambda: False, OWNER.call, False))
    taps = attached(model, QuantizationTap("0", counts))
    with taps.disabled():
        step(model)
    taps.remove()
    step(model)
    assert counts == {}
    idle.remove()
    layer = model[0]
    assert isinstance(layer, BitLinear)
    assert not layer._quantization_hooks


class Uncopyable:
    """Stands for the run, to which the owner of a tap leads."""

    def __deepcopy__(self, memo):
        raise AssertionError("copied with the model")

    def call(self, target, function):
        return function()


def test_copies_of_models_do_not_copy_the_run():
    """Hooks may copy the model, which has the callbacks of taps."""
    model, counts = quantised(), {}
    owner = TapOwner("tapper", lambda: True, Uncopyable().call, may_replace=False)
    attached(model, QuantizationTap("0", counts), GradientTap("0", "input", lambda values: None), owner=owner)
    step(copy.deepcopy(model))
    step(model)
    assert elements(counts)["output_grad"] == 128


def test_a_module_that_does_not_quantise_is_refused():
    with pytest.raises(UsageError, match="'tapper' taps the quantisers of '2', which has none; it is a Linear"):
        attached(quantised(), QuantizationTap("2", {}))
    with pytest.raises(UsageError, match="Unknown module 'nine'"):
        attached(quantised(), QuantizationTap("nine", {}))


def test_listener_copies_received_counts():
    kept: dict[str, Counts] = {}
    listener, given = QuantizationListener(lambda: True, kept), Counts.zeros()
    listener.record("any", given)
    given.sums.fill_(7.0)
    assert not kept["any"].sums.any()


def test_input_tap_sees_inputs_of_differentiated_passes():
    """A pass under no_grad is ignored, and the tap receives detached values."""
    seen: list[Tensor] = []
    model, given = quantised(), torch.randn(3, 32)
    attached(model, GradientTap("0", "input", lambda values: seen.append(values.clone())))
    model(given)
    with torch.no_grad():
        model(given)
    assert len(seen) == 1
    assert torch.equal(seen[0], given)
    assert not seen[0].requires_grad


def test_input_tap_may_only_read():
    """Writing to an input raises StateMutationError, and a tap that replaces inputs is refused."""
    model = quantised()
    taps = attached(model, GradientTap("0", "input", lambda values: values.mul_(2) and None))
    with pytest.raises(StateMutationError, match="on '0' changed an input that it may only read"):
        step(model)
    taps.remove()
    with pytest.raises(UsageError, match="replaces an input; taps can only"):
        attached(model, GradientTap("0", "input", lambda values: values, replaces=True))
