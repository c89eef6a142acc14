import pytest
import torch
from loopscope.engine.commits import ParameterMemory
from loopscope.errors import HookError, LoopscopeError, UsageError
from loopscope.hooks import HookPoint, StatePart, UndeclaredCommitError
from loopscope.state import differing
from loopscope.tensors import copied, gradients, scaled, trainable

from tests.framework.hooks.context_call import BOTH, assert_close, assert_equal, context
from tests.support import OPTIMIZERS, ActingHook, Case, ReadOnlyHook, SpyHook, assert_same_bytes, at, train
from tests.support.odd_objects import Wrapped


def test_commits_are_recorded_and_not_applied():
    ctx = context()
    before = ctx._state.digest()
    ctx.scale_gradients(2.0)
    ctx.scale_gradients({"0.bias": torch.tensor(2.0)})
    ctx.clamp_gradients(0.1)
    ctx.clip_gradients(0.1)
    ctx.replace_gradients({"0.bias": torch.ones(8)})
    ctx.add_to_gradients({"0.bias": torch.ones(8)}, torch.tensor(2.0))
    ctx.blend_parameters({"0.bias": torch.ones(8)}, 0.5)
    ctx.thaw_parameters(["0.weight"])
    ctx.reset_optimizer_state(["0.weight"])
    assert differing(before, ctx._state.digest()) == []
    ctx._open.commits.apply()
    changed = {name.split("/")[0] for name in differing(before, ctx._state.digest())}
    assert changed == {"gradients", "parameters"}


@pytest.mark.parametrize("mutates", [True, False])
def test_thawed_parameter_trains_from_the_next_pass(mutates):
    def thaw(run_ctx, ctx):
        if run_ctx.step == 3:
            ctx.thaw_parameters(["0.weight"])
            assert not ctx.model[0].weight.requires_grad

    seen = []
    watch = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: seen.append(ctx.model[0].weight.detach().clone()))
    freeze = lambda task, state: task.model[0].weight.requires_grad_(False)
    train(Case(), [at(ActingHook, HookPoint.PRE_STEP, commits=BOTH, mutates=mutates)(thaw), watch], introduce=freeze)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reset_optimizer_state_affects_only_named_parameters(optimizer):
    """The step counts of the other parameters continue."""

    def forget(run_ctx, ctx):
        if run_ctx.step == 3:
            ctx.reset_optimizer_state(["0.weight", "0.bias"])
            assert "0.weight" in ctx.optimizer_state

    states = []
    forgetting = at(ActingHook, HookPoint.PRE_STEP, commits=BOTH, mutates=False)(forget)
    watch = at(ReadOnlyHook, HookPoint.POST_STEP)(lambda run_ctx, ctx: states.append(counted(ctx.optimizer_state)))
    train(Case(optimizer=optimizer), [forgetting, watch], steps=4)
    names = [*states[0]]
    assert [*states[1]] == [*states[0]]
    assert sorted(states[2]) == sorted(names)
    total = states[3]["1.weight"]
    assert states[3]["0.weight"] == states[3]["0.bias"] == (2 if total == 4 else total)


def test_wrapped_optimizers_expose_and_reset_their_state():
    """A wrapper around two optimizers lists and resets the state of both."""
    names = []

    def forget(run_ctx, ctx):
        names.append({*ctx.optimizer_state})
        if run_ctx.step == 2:
            ctx.reset_optimizer_state(["0.weight", "0.bias"])

    def introduce(task, state):
        task.optimizer, task.scheduler = state.optimizer, state.scheduler = Wrapped(task.model), None

    forgetting = at(ActingHook, HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, commits=BOTH, mutates=False)(forget)
    run = train(Case(), [forgetting], steps=2, introduce=introduce)
    all_names = {name for name, _ in run.task.model.named_parameters()}
    assert names[:5] == [set(), set(), all_names, all_names - {"0.weight", "0.bias"}, all_names]
    assert sorted({int(state["step"]) for state in run.task.optimizer.parts[1].state.values()}) == [2, 3]


def counted(optimizer_state):
    """Return the optimizer's step count of each parameter, or -1 if it has none."""
    return {name: int(state.get("step", -1)) for name, state in optimizer_state.items()}


def test_commit_for_unknown_parameter_is_refused():
    """No commit is recorded."""
    ctx = context()
    for commit in (ctx.thaw_parameters, ctx.reset_optimizer_state):
        with pytest.raises(UsageError, match="Unknown parameter 'bias'"):
            commit(["bias"])
    assert ctx._open.commits.changes == []


@pytest.mark.parametrize("mutates", [True, False])
def test_commits_of_one_call_are_applied_in_order(mutates):
    """The result equals the same operations in plain PyTorch."""
    ctx = context(mutates=mutates)
    live = copied(gradients(ctx.model))
    ctx.replace_gradients(scaled(10.0, live))
    ctx.scale_gradients(torch.tensor(0.5))
    ctx.scale_gradients({"0.bias": torch.tensor(3.0)})
    ctx.add_to_gradients({"0.bias": live["0.bias"]}, torch.tensor(-2.0))
    ctx.clamp_gradients(0.5)
    ctx.clip_gradients(0.25)
    ctx._open.commits.apply()
    committed, expected = copied(gradients(ctx.model)), scaled(5.0, live)
    expected["0.bias"] = expected["0.bias"] * 3.0 - 2.0 * live["0.bias"]
    for name, parameter in trainable(ctx.model).items():
        parameter.grad = expected[name]
    torch.nn.utils.clip_grad_value_(ctx.model.parameters(), 0.5)
    torch.nn.utils.clip_grad_norm_(ctx.model.parameters(), 0.25)
    assert_close(committed, gradients(ctx.model))


P, Q = "0.bias", "1.bias"  # of equal shape
ALIASING = {
    "replace_gradients": lambda ctx, g, w, see: ctx.replace_gradients({P: see(g[Q]), Q: see(g[P])}),
    "replace_gradients by parameters": lambda ctx, g, w, see: (
        ctx.blend_parameters({P: see(w[Q]), Q: see(w[P])}, 1.0),
        ctx.replace_gradients({P: see(w[P])}),
    ),
    "add_to_gradients": lambda ctx, g, w, see: ctx.add_to_gradients({P: see(g[Q]), Q: see(g[P])}, see(g[P])[0]),
    "scale_gradients": lambda ctx, g, w, see: ctx.scale_gradients(see(g[P])[0]),
    "scale_gradients by name": lambda ctx, g, w, see: ctx.scale_gradients({P: see(g[P])[0], Q: see(g[P])[0]}),
    "blend_parameters": lambda ctx, g, w, see: ctx.blend_parameters({P: see(w[Q]), Q: see(w[P])}, 0.25),
    "twice": lambda ctx, g, w, see: (ctx.scale_gradients(2.0), ctx.replace_gradients({P: see(g[P]), Q: see(g[P])})),
}
VIEWS = {
    "itself": lambda tensor: tensor,
    "alias": lambda tensor: tensor.detach()[1:].as_strided((8,), (1,), tensor.storage_offset()),
    "array": lambda tensor: torch.from_numpy(tensor.detach().numpy()),
    "part of an array": lambda tensor: torch.from_numpy(tensor.detach().numpy()[::1][0:8]),
}


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("commits-are-declared")
@pytest.mark.parametrize("mutates", [True, False])
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("verb", ALIASING)
def test_commit_uses_values_at_the_time_of_call(verb, kind, mutates):
    """Live tensors that alias gradients or parameters give the same result as copies."""
    results = []
    for see in (VIEWS[kind], lambda tensor: tensor.detach().clone()):
        ctx = context(mutates=mutates)
        ALIASING[verb](ctx, gradients(ctx.model), trainable(ctx.model), see)
        ctx._open.commits.apply()
        results.append({**gradients(ctx.model), **{f"{name} itself": p for name, p in ctx.model.named_parameters()}})
    assert_equal(*results)


def test_commit_copies_only_tensors_that_alias_the_model():
    """ParameterMemory.overlaps is true only for tensors that share storage with a parameter."""
    ctx = context(mutates=False)
    memory = ParameterMemory(ctx.model.parameters())
    assert not memory.overlaps(torch.ones(8))
    assert memory.overlaps(ctx.model[0].weight[1:])


UNDECLARED = {
    "scale_gradients": (StatePart.PARAMETERS, lambda ctx: ctx.scale_gradients(2.0)),
    "clamp_gradients": (StatePart.PARAMETERS, lambda ctx: ctx.clamp_gradients(2.0)),
    "clip_gradients": (StatePart.PARAMETERS, lambda ctx: ctx.clip_gradients(2.0)),
    "replace_gradients": (StatePart.PARAMETERS, lambda ctx: ctx.replace_gradients({})),
    "add_to_gradients": (StatePart.PARAMETERS, lambda ctx: ctx.add_to_gradients({}, torch.tensor(1.0))),
    "blend_parameters": (StatePart.GRADIENTS, lambda ctx: ctx.blend_parameters({}, 0.5)),
    "thaw_parameters": (StatePart.GRADIENTS, lambda ctx: ctx.thaw_parameters([])),
    "reset_optimizer_state": (StatePart.PARAMETERS, lambda ctx: ctx.reset_optimizer_state([])),
}


@pytest.mark.guarantee("commits-are-declared")
@pytest.mark.parametrize("verb", UNDECLARED)
def test_commit_to_undeclared_part_is_refused(verb):
    """A commit to a part of the state that the hook's class does not declare is refused at the call."""
    declared, call = UNDECLARED[verb]
    ctx = context(commits=frozenset({declared}))
    with pytest.raises(UndeclaredCommitError, match=f"{verb} changes the .* which hook 'probe' does not declare"):
        call(ctx)
    assert ctx._open.commits.changes == []


def test_commit_of_wrong_shape_is_refused():
    """Unknown parameter names are refused as well."""
    ctx = context()
    for commit in (ctx.replace_gradients, lambda vector: ctx.blend_parameters(vector, 0.5)):
        with pytest.raises(LoopscopeError, match="shape"):
            commit({"0.bias": torch.ones(3)})
        with pytest.raises(UsageError, match="Unknown parameter"):
            commit({"bias": torch.ones(3)})
    assert ctx._open.commits.changes == []


def test_invalid_factors_and_limits_are_refused():
    """Factors have a wrong name or shape; limits are zero, negative or NaN."""
    ctx = context()
    with pytest.raises(UsageError, match="Unknown parameter 'bias'"):
        ctx.scale_gradients({"bias": 2.0})
    with pytest.raises(LoopscopeError, match="shape"):
        ctx.scale_gradients({"0.bias": torch.ones(8)})
    for max_value in (0.0, -1.0, float("nan")):
        with pytest.raises(LoopscopeError, match=f"max_value is {max_value}; it must be positive"):
            ctx.clamp_gradients(max_value)
    assert ctx._open.commits.changes == []


def test_factors_from_rolled_back_tensors_keep_their_value():
    """A factor is a view of a parameter that the hook changed before the rollback."""

    def shrink(run_ctx, ctx):
        factor = ctx.model[0].bias.detach()[0]
        factor.fill_(0.5)
        ctx.scale_gradients({name: factor for name in gradients(ctx.model)})

    case = Case("batchnorm_mlp", "sgd_momentum")
    shrunk = train(case, [committing(shrink)])
    assert shrunk.final == train(case, [committing(lambda run_ctx, ctx: ctx.scale_gradients(0.5))]).final


def committing(act, **attributes):
    hook = at(ActingHook, HookPoint.POST_BACKWARD, commits=BOTH, needs_pre_epoch_state=False, **attributes)
    return hook(act)


def test_mutating_hook_commits_values_and_is_rolled_back():
    """Only the committed gradients remain; mode and parameters are restored."""

    def double(run_ctx, ctx):
        live = gradients(ctx.model)
        for gradient in live.values():
            gradient.mul_(2.0)
        ctx.replace_gradients(live)
        ctx.model.eval()
        ctx.apply_perturbation(trainable(ctx.model), 1.0)

    case = Case("batchnorm_mlp", "sgd_momentum")
    doubled = train(case, [committing(double)])
    scaled_by_two = train(case, [committing(lambda run_ctx, ctx: ctx.scale_gradients(2.0), mutates=False)])
    assert doubled.final == scaled_by_two.final


@pytest.mark.guarantee("commits-are-declared")
def test_hook_that_raises_commits_nothing():
    """With on_error="skip" the run is the bare run; otherwise it ends with HookError."""

    def commit_and_raise(run_ctx, ctx):
        ctx.scale_gradients(0.0)
        raise ValueError("half-way")

    case = Case()
    with pytest.warns(UserWarning, match="half-way"):
        run = train(case, [committing(commit_and_raise, mutates=False)], on_error="skip")
    assert_same_bytes(run, case)
    assert train(case, [committing(commit_and_raise)], raises=HookError).error is not None
