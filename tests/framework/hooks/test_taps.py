"""Taps: they read exact gradients, replace them only if declared, and have no other effects."""

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import HookError, StateMutationError, UsageError
from loopscope.hooks import (
    GradientTap,
    HookPoint,
    InterventionHook,
    StatePart,
    StepSchedule,
    TapOwner,
    TrainingHook,
    treatments,
)
from loopscope.loops import epoch_loop
from loopscope.taps import TapSet
from torch import Tensor, nn
from torch.nn import functional

from tests.support import (
    ActingHook,
    Case,
    Mishap,
    Run,
    SpyHook,
    at,
    bare_run,
    build,
    differences,
    mean_loss,
    raising,
    run_info,
    train,
)

CASES = [Case("batchnorm_mlp"), Case("tied"), Case("transformer", loop="step")]
WEIGHT = GradientTap("0.weight", "parameter", lambda gradient: None)


class Tapper(TrainingHook):
    """An observer with taps."""

    name = "tapper"
    hook_points = frozenset({HookPoint.POST_STEP})

    def __init__(self, *taps: GradientTap) -> None:
        self._taps = taps

    def compute(self, ctx):
        return {}

    def describe_metrics(self):
        return []

    def taps(self, model):
        return self._taps


class Replacer(Tapper, InterventionHook):
    """A hook whose taps may replace gradients."""

    name = "replacer"
    mutates = False
    commits = frozenset({StatePart.GRADIENTS})

    def intervene(self, run_ctx, model_ctx):
        return {}


class TapLog:
    """Records the gradients that its taps receive."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def tap(self, target: str, kind: str) -> GradientTap:
        return GradientTap(target, kind, lambda gradient: self.seen.append(gradient.clone()))


def gradients_of(name: str, seen: list[Tensor]) -> TrainingHook:
    """Return a spy that records a parameter's gradient at POST_BACKWARD."""
    return at(SpyHook, HookPoint.POST_BACKWARD)(
        lambda ctx: seen.append(ctx.model.get_parameter(name).grad.clone()) or {}
    )


def attached(model: nn.Module) -> int:
    """Count the hooks on a model's parameters and modules."""
    on_parameters = sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())
    return on_parameters + sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize(("model", "name"), [("batchnorm_mlp", "0.weight"), ("tied", "embedding.weight")])
def test_parameter_tap_receives_the_exact_gradient(model, name):
    log, gradients = TapLog(), []
    train(Case(model), [Tapper(log.tap(name, "parameter")), gradients_of(name, gradients)], audit=True)
    assert len(log.seen) == 3
    assert all(torch.equal(seen, gradient) for seen, gradient in zip(log.seen, gradients, strict=True))


def test_parameter_tap_is_called_per_micro_batch():
    """The gradients of the micro-batches add up to the gradient of the step."""
    log, gradients = TapLog(), []
    hooks = [Tapper(log.tap("mix.weight", "parameter")), gradients_of("mix.weight", gradients)]
    train(Case("tied"), hooks, steps=3, accumulation_steps=2, audit=True)
    assert len(log.seen) == 6
    assert torch.equal(log.seen[0] + log.seen[1], gradients[0])


def test_output_tap_receives_the_retained_gradient():
    log, retained = TapLog(), []

    def loss_that_retains(model, batch):
        hidden = model[0](batch[0])
        hidden.retain_grad()
        retained.append(hidden)
        return nn.functional.cross_entropy(model[1:](hidden), batch[1])

    task, state = build(Case(), steps=3)
    task.compute_loss = loss_that_retains
    manager = HookManager([Tapper(log.tap("0", "output"))], task, state)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    manager.end("completed")
    assert len(log.seen) == 3
    assert all(torch.equal(seen, hidden.grad) for seen, hidden in zip(log.seen, retained, strict=True))


class Twice(nn.Module):
    """A module with two outputs, used twice in one forward pass."""

    def __init__(self):
        super().__init__()
        self.inner = Splitter()

    def forward(self, x):
        return self.inner(self.inner(x)[0])[0].sum()


class Splitter(nn.Module):
    """Returns a mapping of tensors in a tuple."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight, {"rest": x}


def attach(model: nn.Module, *taps: GradientTap, may_replace: bool = False) -> TapSet:
    tap_set = TapSet(model)
    owner = TapOwner("tapper", lambda: True, lambda target, function: function(), may_replace)
    tap_set.attach(owner, taps)
    return tap_set


def test_tap_is_called_for_every_module_use():
    """The module is called twice in one forward pass."""
    log, model = TapLog(), Twice()
    attach(model, log.tap("inner", "output"))
    model(torch.full((3,), 2.0)).backward()
    assert [seen.tolist() for seen in log.seen] == [[1.0] * 3, [1.0] * 3]


def test_taps_ignore_forward_passes_without_gradients():
    log, model = TapLog(), Twice()
    attach(model, log.tap("inner", "output"))
    with torch.no_grad():
        model(torch.ones(3))
    assert log.seen == []


def assert_same_run(run: Run, case: Case) -> None:
    """Assert that the run equals the bare run after every step, except for taps, and at the end without exception."""
    digests, final = bare_run(case)
    for expected, digest in zip(digests, run.digests, strict=True):
        different = differences(expected, digest)
        assert [name for name in different if not name.startswith(("gradient hooks/", "module hooks/"))] == []
    assert not differences(final, run.final)


def drawing(seen: list[float]) -> Callable[[Tensor], None]:
    def function(gradient: Tensor) -> None:
        seen.append(torch.rand(()).item())
        random.random()
        np.random.standard_normal()

    return function


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_observing_taps_with_random_draws_change_nothing(case):
    """The run equals the bare run at every step, and the taps are removed at its end."""
    module, parameter = {
        "batchnorm_mlp": ("0", "0.weight"),
        "tied": ("mix", "embedding.weight"),
        "transformer": ("embedding", "embedding.weight"),
    }[case.model]
    seen: list[float] = []
    taps = GradientTap(module, "output", drawing(seen)), GradientTap(parameter, "parameter", drawing(seen))
    assert_same_run(train(case, [Tapper(*taps)], audit=True), case)
    assert len(seen) == 6


@pytest.mark.longer
def test_tap_random_draws_ignore_other_hooks():
    """The random draws of a tap depend on the seed, the hook, the target and the step."""

    def draws(*others: TrainingHook) -> list[float]:
        seen: list[float] = []
        train(Case(), [*others, Tapper(GradientTap("0.weight", "parameter", drawing(seen)))], audit=True)
        return seen

    alone = draws()
    assert len(set(alone)) == 3
    assert draws(SpyHook(lambda ctx: {"drawn": torch.rand(())})) == alone


@pytest.mark.longer
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("error", [(), Mishap])
def test_taps_are_removed_after_every_run(error):
    """The run completes or fails."""
    ending = raising if error else (lambda ctx: None)
    hooks = [Tapper(WEIGHT, GradientTap("0", "output", lambda gradient: None)), SpyHook(ending)]
    run = train(Case(), hooks, raises=HookError, audit=True)
    assert (run.error is not None) == bool(error)
    assert attached(run.task.model) == 0


def test_taps_are_removed_if_end_raises():
    """The end() method of the hook raises."""

    class Stubborn(Tapper):
        def end(self, status):
            raise Mishap("at the end")

    task, state = build(Case())
    manager = HookManager([Stubborn(WEIGHT)], task, state)
    manager.start(run_info(task, manager, "epoch"))
    assert attached(task.model) == 1
    with pytest.raises(HookError, match="raised at end of step 0: Mishap"):
        manager.end("completed")
    assert attached(task.model) == 0


@pytest.mark.parametrize(
    ("taps", "sentence"),
    [
        ([WEIGHT, GradientTap("0.wait", "parameter", lambda g: None)], "Unknown parameter '0.wait'. Did you mean '0.w"),
        ([WEIGHT, GradientTap("nine", "output", lambda g: None)], "Unknown module 'nine'"),
        ([WEIGHT, GradientTap("0.bias", "parameter", lambda g: g, replaces=True)], "which the hook does not declare"),
    ],
)
def test_invalid_tap_is_refused_before_the_run(taps, sentence):
    """Taps that were attached before the invalid one are removed."""
    task, state = build(Case())
    manager = HookManager([Tapper(*taps)], task, state)
    with pytest.raises(UsageError, match=sentence):
        manager.start(run_info(task, manager, "epoch"))
    assert attached(task.model) == 0


def test_tap_on_frozen_parameter_is_refused():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with pytest.raises(UsageError, match="taps 'bias', which has no gradient because it is frozen"):
        attach(model, GradientTap("bias", "parameter", lambda gradient: None))


@pytest.mark.longer
def test_optimizer_uses_the_replaced_gradient():
    gradients: list[Tensor] = []
    halve = GradientTap("0.weight", "parameter", lambda gradient: gradient / 2, replaces=True)
    log = TapLog()
    hooks = [Tapper(log.tap("0.weight", "parameter")), Replacer(halve), gradients_of("0.weight", gradients)]
    run = train(Case(), hooks, audit=True)
    assert all(torch.equal(seen / 2, used) for seen, used in zip(log.seen, gradients, strict=True))
    assert treatments(run.manager.hooks) == {"replacer": ("gradients",)}


@pytest.mark.longer
def test_replaced_output_gradient_affects_only_upstream_layers():
    block = GradientTap("1", "output", torch.zeros_like, replaces=True)
    upstream, downstream, untreated = [], [], []
    train(Case(), [Replacer(block), gradients_of("0.weight", upstream)], steps=1, audit=True)
    train(Case(), [Replacer(block), gradients_of("4.weight", downstream)], steps=1, audit=True)
    train(Case(), [gradients_of("4.weight", untreated)], steps=1, audit=True)
    assert not upstream[0].any()
    assert torch.equal(downstream[0], untreated[0])
    assert downstream[0].any()


@pytest.mark.parametrize("hook", [Tapper, at(ActingHook, HookPoint.POST_STEP)])
def test_undeclared_replacement_is_refused_before_the_run(hook):
    """The error asks for StatePart.GRADIENTS in commits."""
    greedy = GradientTap("0.weight", "parameter", lambda gradient: gradient * 0, replaces=True)
    greedy_hook = type("Greedy", (hook,), {"taps": lambda self, model: [greedy]})(lambda *ctx: None)
    with pytest.raises(UsageError, match=r"replaces a gradient, .* add commits = \{StatePart.GRADIENTS\} to its class"):
        train(Case(), [greedy_hook], audit=True)


def return_another(gradient: Tensor) -> Tensor:
    return gradient * 1


def write_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


def write_and_raise(gradient: Tensor) -> None:
    gradient.mul_(2)
    raise Mishap("after the mutation")


def swap_data(gradient: Tensor) -> None:
    gradient.data = torch.zeros_like(gradient)


@pytest.mark.guarantee("commits-are-declared")
@pytest.mark.parametrize("kind", ["parameter", "output"])
@pytest.mark.parametrize("mutation", [return_another, write_in_place, write_and_raise, swap_data])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_undeclared_gradient_change_by_tap_is_caught(kind, mutation, on_error):
    """The audit is off, and on_error does not matter."""
    hook = Tapper(GradientTap({"parameter": "0.weight", "output": "0"}[kind], kind, mutation))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run = train(Case(), [hook], audit=False, on_error=on_error, raises=StateMutationError)
    assert f"The tap of hook 'tapper' on {hook.taps(None)[0].target!r} changed a gradient" in str(run.error)
    assert run.state.loop.step == 1


def write_through_data(gradient: Tensor) -> None:
    gradient.data.mul_(2)


@pytest.mark.guarantee("commits-are-declared")
def test_audit_catches_writes_without_version_bump():
    """A tap changes a gradient without increasing the version counter of the tensor."""
    run = train(
        Case(),
        [Tapper(GradientTap("0.weight", "parameter", write_through_data))],
        raises=StateMutationError,
        audit=True,
    )
    assert "on '0.weight' changed a gradient" in str(run.error)


def test_replacement_of_wrong_shape_raises_with_details():
    """The error gives the hook, the tap and both shapes."""
    wrong = GradientTap("0.weight", "parameter", lambda gradient: gradient[:1], replaces=True)
    run = train(Case(), [Replacer(wrong)], raises=HookError, audit=True)
    assert "Hook 'replacer' raised at tap on '0.weight' of step 1" in str(run.error)
    assert "shape (1, 4) as replacement of a gradient of torch.float32 and shape (8, 4)" in str(run.error)


def grads_by_hand(ctx) -> None:
    with torch.enable_grad():
        output = ctx.model[0](torch.ones(2, 4))
        torch.autograd.grad(output.sum(), [*ctx.model[0].parameters(), output])


def count_calls(*others: TrainingHook, **options) -> int:
    log = TapLog()
    hooks = [Tapper(log.tap("0", "output"), log.tap("0.weight", "parameter")), *others]
    train(Case(), hooks, **options)
    return len(log.seen)


@pytest.mark.guarantee("observers-change-nothing")
def test_taps_are_inactive_during_intervention_backward():
    """The intervention computes gradients and trains an epoch."""

    def act(run_ctx, model_ctx):
        model_ctx.compute_batch_gradients()
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
        model_ctx.model.zero_grad()
        with torch.enable_grad():
            mean_loss(model_ctx.model, run_ctx.batch_data).backward()

    assert count_calls(at(ActingHook, HookPoint.PRE_STEP)(act)) == 6


def test_taps_are_inactive_during_observer_backward():
    assert count_calls(at(SpyHook, HookPoint.PRE_STEP)(grads_by_hand)) == 6


def test_taps_are_inactive_during_evaluation():
    def evaluate(model):
        with torch.enable_grad():
            output = model[0](torch.ones(2, 4))
            torch.autograd.grad(output.sum(), [output, *model[0].parameters()])
        return {}

    assert count_calls(evaluate=evaluate) == 6


def test_taps_resume_after_a_failed_intervention():
    """The intervention raises and is skipped."""
    failing = at(ActingHook, HookPoint.PRE_STEP)(raising)
    with pytest.warns(UserWarning, match="The run continues without this hook"):
        assert count_calls(failing, on_error="skip") == 6


def tap_steps(**attributes) -> list[int]:
    task, state = build(Case(), steps=9)
    steps: list[int] = []
    note = GradientTap("0.weight", "parameter", lambda gradient: steps.append(state.loop.step))
    manager = HookManager([type("Scheduled", (Tapper,), attributes)(note)], task, state)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    manager.end("completed")
    return steps


@pytest.mark.longer
def test_taps_follow_the_hooks_schedule_windows_and_loops():
    assert tap_steps() == list(range(1, 10))
    assert tap_steps(step_schedule=StepSchedule(mode="stride", every_n_steps=4)) == [1, 5, 9]
    assert tap_steps(loop_points={"epoch": {HookPoint.POST_STEP: (1, 1)}}) == [4, 5, 6]


def test_module_hooks_exist_only_at_due_steps():
    """The taps of the hook have a stride of two steps; the first step has a second hook, for compiled functions."""
    tapper, counts = Tapper(GradientTap("0", "output", lambda gradient: None)), []
    tapper.step_schedule = StepSchedule(mode="stride", every_n_steps=2)
    train(
        Case(),
        [tapper, at(SpyHook, HookPoint.POST_BACKWARD)(lambda ctx: counts.append(attached(ctx.model)))],
        audit=True,
    )
    assert counts == [2, 0, 1]


def test_raising_tap_ends_the_run_with_details():
    """The error gives the hook, the tap and the step."""
    run = train(Case(), [Tapper(GradientTap("0.weight", "parameter", raising))], raises=HookError, audit=True)
    assert str(run.error).startswith("Hook 'tapper' raised at tap on '0.weight' of step 1: Mishap: on purpose")


def test_raising_tap_can_be_skipped_without_trace():
    """With on_error="skip" the run equals the bare run."""
    hook = Tapper(GradientTap("0", "output", raising), GradientTap("0.weight", "parameter", raising))
    with pytest.warns(UserWarning, match="raised at tap on '0' of step 1.*continues without this hook"):
        run = train(Case(), [hook], on_error="skip", audit=True)
    assert_same_run(run, Case())
    assert [error["point"] for error in run.manager.hooks.failures.errors] == ["tap on '0'"]


class Failing(nn.Linear):
    """A projection whose forward raises once."""

    fails = True

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fails:
            self.fails = False
            raise Mishap("on purpose")
        return super().forward(inputs)


def tapped(model: nn.Module, *targets: str, function: Callable = lambda gradient: None) -> TapSet:
    """Return taps on weights of a model without a run."""
    taps = TapSet(model)
    owner = TapOwner("any", lambda: True, lambda target, function: function(), may_replace=True)
    taps.attach(owner, [GradientTap(target, "weight", function, replaces=True) for target in targets])
    return taps


def test_weight_tap_works_after_a_failed_forward():
    """Calls after the removal of the tap are not recorded."""
    model, seen = nn.Sequential(Failing(2, 2)), []
    taps = tapped(model, "0", function=lambda gradient: seen.append(gradient.clone()))
    with pytest.raises(Mishap):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()
    taps.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(torch.stack(seen), torch.ones(1, 2, 2))


class Heads(nn.Module):
    """Two heads that share a matrix, which is also used by a function and after a separate cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.tanh()
        parts = [self.first(part) for part in hidden.split(2)]
        other = self.second(hidden) + functional.linear(hidden, self.first.weight)
        return torch.cat(parts) + other + hidden @ self.first.weight.bfloat16().to(hidden.dtype).t()


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weight_tap_separates_uses_of_shared_weight(dtype):
    """Attached taps do not change the bits of the gradient, with and without autocast."""
    torch.manual_seed(0)
    model, inputs, seen = Heads(), torch.randn(5, 4), []

    def gradient() -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(inputs).square().mean()
        loss.backward()
        return model.first.weight.grad.clone()

    untapped = gradient()
    taps = tapped(model, "first", function=lambda gradient: seen.append(gradient.clone()))
    assert torch.equal(gradient(), untapped)
    assert len(seen) == 3
    assert {part.dtype for part in seen} == {torch.float32}
    taps.remove()
    zeroing = tapped(model, "first", function=torch.zeros_like)
    remainder = gradient()
    zeroing.remove()
    torch.testing.assert_close(remainder + sum(seen), untapped, rtol=0.05, atol=0.01)
    assert not torch.equal(remainder, untapped)


def test_weight_taps_of_all_uses_sum_to_gradient():
    """Embedding and decoder of the tied model share a weight."""
    parts = TapLog()
    total_gradient = gradients_of("embedding.weight", seen := [])
    tapper = Tapper(parts.tap("decoder", "weight"), parts.tap("embedding", "weight"))
    train(Case("tied"), [tapper, total_gradient], audit=True)
    assert len(parts.seen) == 2 * len(seen) == 6
    for g_out, g_in, total in zip(parts.seen[::2], parts.seen[1::2], seen, strict=True):
        assert torch.equal(g_out + g_in, total)


def test_weight_tap_without_trainable_weight_is_refused():
    """The module has no weight, or its weight is frozen."""
    owner = TapOwner("any", lambda: True, lambda target, function: function(), may_replace=False)
    with pytest.raises(UsageError, match="taps the weight of '0', which has no weight"):
        TapSet(nn.Sequential(nn.ReLU())).attach(owner, [GradientTap("0", "weight", lambda gradient: None)])
    frozen = nn.Sequential(nn.Linear(1, 1)).requires_grad_(False)
    with pytest.raises(UsageError, match="taps '0', which has no gradient because it is frozen"):
        TapSet(frozen).attach(owner, [GradientTap("0", "weight", lambda gradient: None)])
