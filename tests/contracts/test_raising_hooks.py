"""A hook that raises changes nothing; the run ends with its name, or continues as if it had never existed."""

import warnings

import pytest
import torch
from loopscope.errors import HookError, StateMutationError
from loopscope.hooks import HookPoint, StatePart

from tests.contracts.test_misbehaving_hooks import restored_process_settings
from tests.support import (
    LOOPS,
    ActingHook,
    Case,
    Mishap,
    ReadOnlyHook,
    SpyHook,
    assert_same_bytes,
    at,
    bare_run,
    differences,
    raising,
    train,
)
from tests.support.misbehaving_hooks import MUTATIONS, Scene, train_one_step

CASES = [Case(loop=loop, model=model) for loop in LOOPS for model in ("batchnorm_mlp", "transformer")]
STEP_POINTS = [HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.POST_STEP]
CommittingHook = at(ActingHook, HookPoint.POST_BACKWARD, mutates=False, commits=frozenset(StatePart), name="committing")
KINDS = [SpyHook, ActingHook, ReadOnlyHook]

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def spoil_and_raise(run_ctx, model_ctx):
    """Take a training step, zero the weights, drop the gradients, and raise."""
    train_one_step(Scene(model_ctx._task, model_ctx._state))
    with torch.no_grad():
        for parameter in model_ctx.model.parameters():
            parameter.zero_()
            parameter.grad = None
    raise Mishap("half-way")


def commit_and_raise(run_ctx, model_ctx):
    model_ctx.scale_gradients(0.0)
    model_ctx.replace_gradients({name: torch.ones_like(p) for name, p in run_ctx.model.named_parameters()})
    raise Mishap("after committing")


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("point", STEP_POINTS)
@pytest.mark.parametrize("kind", KINDS)
@every_case
def test_error_names_hook_point_and_step(case, kind, point):
    """The message quotes the raising line, and the final state is that of the bare run."""
    run = train(case, [at(kind, point)(raising)], raises=HookError, audit=True)
    assert str(run.error).startswith(f"Hook {kind.name!r} raised at {point.name} of step 1: Mishap: on purpose [")
    assert str(run.error).endswith('in raising: raise Mishap("on purpose")]')
    assert isinstance(run.error.__cause__, Mishap)
    stopped_run = train(case, [at(SpyHook, point)(stop_here)], raises=HookError, audit=True)
    assert differences(stopped_run.final, run.final) == []


def stop_here(ctx):
    raise Mishap("here")


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("point", [*STEP_POINTS, HookPoint.SNAPSHOT])
@every_case
def test_half_finished_intervention_leaves_bare_run_state(case, point):
    """An intervention that changes the state and then raises is rolled back at every hook point."""
    run = train(case, [at(ActingHook, point)(spoil_and_raise)], raises=HookError, audit=True)
    stopped_run = train(case, [at(SpyHook, point)(stop_here)], raises=HookError, audit=True)
    assert differences(stopped_run.final, run.final) == []


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("kind", KINDS)
@every_case
def test_skip_finishes_run_like_bare_run(case, kind):
    """The run warns once, records the error and still calls the other hooks at every step."""
    bystander = at(SpyHook, *HookPoint, name="bystander")(lambda ctx: {"x": 1.0})
    with pytest.warns(UserWarning, match=f"Hook '{kind.name}' raised at .* The run continues without this hook"):
        run = train(case, [kind(raising), bystander], on_error="skip", audit=True)
    assert_same_bytes(run, case)
    (error,) = run.manager.hooks.failures.errors
    assert (error["hook"], error["error"]) == (kind.name, "Mishap: on purpose")
    assert [seen[2] for seen in bystander.seen if seen[0] == "POST_STEP"] == [1, 2, 3]


@pytest.mark.some_rows(2)
@every_case
def test_skip_rolls_back_raising_intervention(case):
    with pytest.warns(UserWarning, match="raised at"):
        run = train(case, [at(ActingHook, HookPoint.POST_STEP)(spoil_and_raise)], on_error="skip", audit=True)
    assert_same_bytes(run, case)


@pytest.mark.longer
@every_case
def test_commits_of_raising_hook_are_not_applied(case):
    """In skip mode, a hook that raises after committing leaves the result of the bare run."""
    with pytest.warns(UserWarning, match="after committing"):
        run = train(case, [CommittingHook(commit_and_raise)], on_error="skip", audit=True)
    assert_same_bytes(run, case)
    assert len(run.manager.hooks.failures.errors) == 1


@pytest.mark.longer
@pytest.mark.some_rows(2)
@every_case
def test_commits_of_other_hooks_survive_a_raise(case):
    """The result equals that of a run with the other committing hook alone."""
    halving = at(ActingHook, HookPoint.POST_BACKWARD, mutates=False, commits=CommittingHook.commits, name="halving")
    halve = lambda run_ctx, model_ctx: model_ctx.scale_gradients(0.5)
    halving_run = train(case, [halving(halve)], audit=True)
    with pytest.warns(UserWarning, match="after committing"):
        run = train(case, [CommittingHook(commit_and_raise), halving(halve)], on_error="skip", audit=True)
    assert run.digests == halving_run.digests
    assert run.digests != bare_run(case)[0]


def interrupt(run_ctx, model_ctx):
    train_one_step(Scene(model_ctx._task, model_ctx._state))
    raise KeyboardInterrupt


@pytest.mark.some_rows(2)
@every_case
def test_interrupt_during_intervention_is_rolled_back(case):
    """A KeyboardInterrupt in the middle of an intervention leaves the state of the bare run."""
    run = train(case, [at(ActingHook, HookPoint.POST_STEP)(interrupt)], raises=KeyboardInterrupt, audit=True)
    stopped_run = train(case, [at(SpyHook, HookPoint.POST_STEP)(stop_here)], raises=HookError, audit=True)
    assert differences(stopped_run.final, run.final) == []


def test_metrics_before_a_raise_are_delivered():
    """A hook that raises at step 3 still delivers its metrics of steps 1 and 2."""
    calls = []

    def third_time(ctx):
        calls.append(ctx.step)
        if len(calls) == 3:
            raise Mishap("at last")
        return {"step": float(ctx.step)}

    with pytest.warns(UserWarning, match="at last"):
        run = train(Case(), [at(SpyHook, HookPoint.POST_STEP)(third_time)], on_error="skip", audit=True)
    assert [row[2:] for row in run.sink.rows("spy/")] == [(1, 1.0), (2, 2.0)]


# Changes that a read-only hook made before it raised

MisbehavingObserver = at(SpyHook, HookPoint.POST_STEP)
MisbehavingReader = at(ReadOnlyHook, HookPoint.POST_STEP)
REVERSIBLE = [
    *("evaluate_for_good", "freeze_the_model", "change_dropout", "drop_a_gradient", "replace_a_gradient"),
    *("leave_a_forward_hook", "leave_a_forward_pre_hook", "change_the_default_dtype", "require_determinism"),
    *("change_the_number_of_threads", "leave_grad_mode_off", "enter_a_function_mode", "enter_a_dispatch_mode"),
    *("lower_the_matmul_precision", "enter_inference_mode", "change_the_default_device", "flush_denormals"),
    *("leave_saved_tensor_hooks", "leave_a_hook_on_all_modules"),
    "lower_the_precision_of_one_backend",
]


def train_with_mutation(kind, name, error, **options):
    """Train with a hook that makes a mutation and raises at step 5, where the tripwire no longer compares bytes."""
    introduced = {}

    def act(ctx, *rest):
        if ctx.step == 5:
            MUTATIONS[name](Scene(*introduced["run"]))
            raise error

    introduce = lambda *run: introduced.update(run=run)
    with restored_process_settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return train(Case(), [kind(act)], length=2, introduce=introduce, **{"audit": True, **options})


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize(("kind", "audit"), [(MisbehavingObserver, False), (MisbehavingReader, True)])
@pytest.mark.parametrize("name", REVERSIBLE)
def test_skip_restores_changes_of_raising_reader(name, kind, audit):
    """An observer or read-only intervention changes the state and raises, and the run continues without it."""
    run = train_with_mutation(kind, name, Mishap("and raised"), on_error="skip", audit=audit)
    assert run.digests == train(Case(), length=2, audit=False).digests
    assert [error["error"] for error in run.manager.hooks.failures.errors] == ["Mishap: and raised"]


@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("name", ["edit_the_learning_rate", "write_in_place", "lower_all_precisions"])
def test_unrestorable_change_is_reported_despite_skip(name):
    """The StateMutationError has the hook's own error as its context."""
    run = train_with_mutation(
        MisbehavingObserver, name, Mishap("and raised"), on_error="skip", raises=StateMutationError
    )
    assert "Hook 'spy' at POST_STEP of step 5 may only read, but changed" in str(run.error)
    assert isinstance(run.error.__context__, Mishap)


def test_hook_on_parameter_is_removed_after_raise():
    """The run removes a tensor hook that an observer left on a parameter before it raised."""
    run = train_with_mutation(
        MisbehavingObserver, "leave_a_hook_on_a_parameter", Mishap("x"), on_error="skip", audit=False
    )
    assert run.digests == train(Case(), length=2, audit=False).digests


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("bye"), GeneratorExit()], ids=repr)
def test_exit_in_hook_counts_as_hook_error(kind, error):
    """SystemExit and GeneratorExit become a HookError, or a warning in skip mode."""

    def raise_error(*contexts):
        raise error

    run = train(Case(), [at(kind, HookPoint.POST_STEP)(raise_error)], raises=HookError, audit=True)
    assert f"raised at POST_STEP of step 1: {type(error).__name__}" in str(run.error)
    with pytest.warns(UserWarning, match="The run continues without this hook"):
        assert_same_bytes(train(Case(), [kind(raise_error)], on_error="skip", audit=True), Case())


def test_interrupt_in_observer_restores_module_modes():
    """The run raises the KeyboardInterrupt unchanged, with every module in training mode again."""

    def interrupt_in_eval_mode(ctx):
        ctx.model.eval()
        raise KeyboardInterrupt

    run = train(
        Case(), [at(SpyHook, HookPoint.POST_STEP)(interrupt_in_eval_mode)], raises=KeyboardInterrupt, audit=True
    )
    assert isinstance(run.error, KeyboardInterrupt)
    assert all(module.training for module in run.task.model.modules())
