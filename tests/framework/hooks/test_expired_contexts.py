"""A model context expires with its call: afterwards every method raises an error and changes nothing."""

from functools import partial

import pytest
import torch
from loopscope.errors import HookError
from loopscope.hooks import HookPoint, ModelDataContext, StatePart
from loopscope.hooks.model_data_context import ExpiredError

from tests.support import ActingHook, Case, SpyHook, assert_same_bytes, at, data_for, train

VECTOR = {"0.weight": torch.ones(8, 4)}
BATCH = tuple(tensor[:7] for tensor in data_for("batchnorm_mlp"))
LATE = {
    "model": lambda ctx: ctx.model,
    "device": lambda ctx: ctx.device,
    "loader": lambda ctx: ctx.loader,
    "optimizer_state": lambda ctx: ctx.optimizer_state,
    "rows": lambda ctx: ctx.rows(BATCH),
    "compute_batch_loss": lambda ctx: ctx.compute_batch_loss(BATCH),
    "compute_batch_gradients": lambda ctx: ctx.compute_batch_gradients(BATCH),
    "measure_rows": lambda ctx: ctx.measure_rows(BATCH),
    "compute_gradients": lambda ctx: ctx.compute_gradients(),
    "hessian_vector_product": lambda ctx: ctx.hessian_vector_product(VECTOR, BATCH, method="finite_difference"),
    "hessian_operator": lambda ctx: ctx.hessian_operator(BATCH),
    "find_hessian_problem": lambda ctx: ctx.find_hessian_problem(BATCH),
    "save_checkpoint": lambda ctx: ctx.save_checkpoint(),
    "restore_checkpoint": lambda ctx: ctx.restore_checkpoint(1),
    "discard_checkpoint": lambda ctx: ctx.discard_checkpoint(1),
    "branch": lambda ctx: ctx.branch().__enter__(),
    "restore_pre_epoch": lambda ctx: ctx.restore_pre_epoch(),
    "run_training_epoch": lambda ctx: ctx.run_training_epoch([BATCH], step=False),
    "take_step": lambda ctx: ctx.take_step(BATCH),
    "get_shuffled_loader": lambda ctx: ctx.get_shuffled_loader(),
    "apply_perturbation": lambda ctx: ctx.apply_perturbation(VECTOR, 1.0),
    "scale_gradients": lambda ctx: ctx.scale_gradients(0.5),
    "clamp_gradients": lambda ctx: ctx.clamp_gradients(1.0),
    "clip_gradients": lambda ctx: ctx.clip_gradients(1.0),
    "replace_gradients": lambda ctx: ctx.replace_gradients(VECTOR),
    "add_to_gradients": lambda ctx: ctx.add_to_gradients(VECTOR, torch.tensor(1.0)),
    "blend_parameters": lambda ctx: ctx.blend_parameters(VECTOR, 0.5),
    "thaw_parameters": lambda ctx: ctx.thaw_parameters(["0.weight"]),
    "reset_optimizer_state": lambda ctx: ctx.reset_optimizer_state(["0.weight"]),
}
MADE_BEFORE = {
    "exact operator": lambda ctx: partial(ctx.hessian_operator(), VECTOR),
    "operator by differences": lambda ctx: partial(ctx.hessian_operator(method="finite_difference"), VECTOR),
    "method": lambda ctx: partial(ctx.take_step, BATCH),
}


def test_all_context_methods_are_covered():
    methods = {name for name in dir(ModelDataContext) if not name.startswith("_")}
    assert methods == LATE.keys()


class Late:
    """Stores an object made from the context of a first call, and uses it in later calls of other hooks."""

    def __init__(self, make, use) -> None:
        self.make, self.use = make, use
        self.stored: list = []
        self.refused: list[str] = []

    def keep(self, run_ctx, model_ctx):
        model_ctx.save_checkpoint()
        if not self.stored:
            self.stored.append(self.make(model_ctx))

    def use_it(self, run_ctx, *rest):
        with pytest.raises(ExpiredError, match="of hook 'keeper' at PRE_STEP of step 1 was used after that call"):
            self.use(self.stored[0])
        self.refused.append(run_ctx.hook_point.name)


def assert_refused(late: Late) -> None:
    keeper = at(ActingHook, HookPoint.PRE_STEP, name="keeper", commits=frozenset(StatePart))
    later = at(ActingHook, HookPoint.POST_BACKWARD, commits=frozenset(StatePart))
    hooks = [keeper(late.keep), later(late.use_it), at(SpyHook, HookPoint.POST_STEP)(late.use_it)]
    assert_same_bytes(train(Case(), hooks, audit=False), Case())
    assert late.refused == ["POST_BACKWARD", "POST_STEP"] * 3


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("name", LATE)
def test_kept_context_is_refused_in_later_call(name):
    """Every method of a context that a hook has kept raises an error and changes nothing."""
    assert_refused(Late(lambda ctx: ctx, LATE[name]))


@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("name", MADE_BEFORE)
def test_objects_made_by_context_expire_with_it(name):
    """Functions that a context created in its call raise an error in a later call."""
    assert_refused(Late(MADE_BEFORE[name], lambda made: made()))


def test_late_use_error_names_the_using_hook():
    """The error is raised for the hook that uses the context and also names the hook that kept it."""
    late = Late(lambda ctx: ctx, LATE["take_step"])
    hooks = [at(ActingHook, HookPoint.PRE_STEP, name="keeper")(late.keep),
             at(SpyHook, HookPoint.POST_STEP)(lambda ctx: late.use(late.stored[0]))]  # fmt: skip
    run = train(Case(), hooks, raises=HookError)
    assert "Hook 'spy' raised at POST_STEP of step 1: ExpiredError: The model context of hook 'keeper'" in str(
        run.error
    )


def test_commits_survive_their_expired_context():
    """The loop applies a committed gradient scaling after the context has expired."""
    halve = lambda run_ctx, model_ctx: model_ctx.scale_gradients(0.5)
    committing = at(ActingHook, HookPoint.POST_BACKWARD, commits=frozenset({StatePart.GRADIENTS}))
    seen = []
    spy = at(SpyHook, HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE)(
        lambda ctx: seen.append(ctx.model[0].weight.grad.clone()) or {}
    )
    train(Case(), [committing(halve), spy], steps=1)
    assert torch.equal(seen[0] / 2, seen[1])
