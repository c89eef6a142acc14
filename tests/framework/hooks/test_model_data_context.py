import pytest
import torch
from loopscope.data import TensorLoader
from loopscope.errors import LoopscopeError, UsageError
from loopscope.hooks import HookPoint, ModelDataContext, ReadOnlyError
from loopscope.state import differing, seed_everything
from loopscope.tensors import copied, gradients, trainable
from torch import Tensor, nn
from torch.nn import functional

from tests.framework.hooks.context_call import ROWS, assert_close, assert_equal, context, mean_loss, plain_model
from tests.support import ActingHook, Case, ReadOnlyHook, assert_same_bytes, at, train


def disturb(ctx: ModelDataContext) -> None:
    """Change parameters, buffers, optimizer, scheduler, gradients, modes and streams."""
    ctx.run_training_epoch(ctx.get_shuffled_loader())
    ctx._task.scheduler.step()
    ctx.model.eval()
    for parameter in ctx.model.parameters():
        parameter.grad = None


def test_full_checkpoint_restores_every_byte_repeatedly():
    """One checkpoint restores the digest twice after changes to every part of the state."""
    ctx = context()
    before = ctx._state.digest()
    token = ctx.save_checkpoint()
    for _ in range(2):
        disturb(ctx)
        assert differing(before, ctx._state.digest())
        ctx.restore_checkpoint(token)
        assert differing(before, ctx._state.digest()) == []


def test_light_checkpoint_restores_parameters_buffers_and_streams():
    """Only the optimizer state keeps its changes."""
    ctx = context()
    before = ctx._state.digest()
    token = ctx.save_checkpoint(full=False)
    ctx.run_training_epoch(ctx.loader)
    torch.rand(3)
    ctx.restore_checkpoint(token)
    assert {name.split("/")[0] for name in differing(before, ctx._state.digest())} == {"optimizer"}


def test_nested_checkpoints_keep_their_own_states():
    """Two checkpoints are restored in any order."""
    ctx = context()
    digests, tokens = [], []
    for _ in range(2):
        digests.append(ctx._state.digest())
        tokens.append(ctx.save_checkpoint())
        disturb(ctx)
    for index in (0, 1, 0):
        ctx.restore_checkpoint(tokens[index])
        assert differing(digests[index], ctx._state.digest()) == []


def test_discarded_or_unknown_checkpoint_is_refused():
    """The error names the token and the tokens in use."""
    ctx = context()
    token, other = ctx.save_checkpoint(), ctx.save_checkpoint(full=False)
    ctx.discard_checkpoint(token)
    for verb in (ctx.restore_checkpoint, ctx.discard_checkpoint):
        with pytest.raises(LoopscopeError, match=rf"Checkpoint {token} does not exist; existing tokens: \[{other}\]"):
            verb(token)


@pytest.mark.parametrize("full", [True, False])
def test_branch_is_undone_after_an_error(full):
    ctx = context()
    before = copied(trainable(ctx.model))
    with pytest.raises(UsageError, match="Unknown parameter"), ctx.branch(full=full):
        [ctx.apply_perturbation(vector, 2.0) for vector in (before, {"other": torch.ones(1)})]
    assert_equal(copied(trainable(ctx.model)), before)
    assert ctx._open.checkpoints == {}


@pytest.mark.longer
@pytest.mark.guarantee("interventions-are-undone")
def test_restored_pre_epoch_state_replays_the_epoch_exactly():
    """Two replays give the gradients and weights of the run bit for bit, and the run keeps its bytes."""
    replayed: list[bool] = []

    def act(run_ctx, ctx):
        after = copied(trainable(ctx.model))
        for _ in range(2):
            ctx.restore_pre_epoch()
            gradients_of_epoch = ctx.run_training_epoch(ctx.loader)
            assert_equal(gradients_of_epoch, dict(run_ctx.accumulated_grads))
            assert_equal(copied(trainable(ctx.model)), after)
            replayed.append(True)

    case = Case("transformer", "adamw_foreach")
    hook = at(ActingHook, HookPoint.POST_EPOCH, HookPoint.SNAPSHOT)(act)
    assert_same_bytes(train(case, [hook], steps=6), case, 6)
    assert len(replayed) == 6


def test_pre_epoch_state_must_be_requested():
    """Without needs_pre_epoch_state, restoring raises with a hint to set it."""
    with pytest.raises(LoopscopeError, match="needs_pre_epoch_state = True"):
        context().restore_pre_epoch()


def test_batch_gradients_match_autograd_during_accumulation():
    """The loss of the current or a given batch is exact too."""
    ctx = context(plain_model())
    batch = ctx._state.loop.batch
    measured = ctx.compute_batch_gradients()
    parameters = trainable(ctx.model)
    expected = torch.autograd.grad(mean_loss(ctx.model, batch), list(parameters.values()))
    assert_equal(measured, dict(zip(parameters, expected, strict=True)))
    assert ctx.compute_batch_loss() == mean_loss(ctx.model, batch)
    other = tuple(tensor[5:8] for tensor in ctx.loader._tensors)
    assert ctx.compute_batch_loss(other) == mean_loss(ctx.model, other)


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("verb", ["compute_batch_loss", "compute_batch_gradients", "compute_gradients"])
@pytest.mark.parametrize("training", [True, False])
def test_measurement_leaves_state_and_gradients_in_place(verb, training):
    """Digest, gradient tensors and buffer addresses stay the same in both modes."""
    ctx = context()
    ctx.model.train(training)
    before, live = ctx._state.digest(), gradients(ctx.model)
    buffers = [buffer.data_ptr() for buffer in ctx.model.buffers()]
    getattr(ctx, verb)()
    assert differing(before, ctx._state.digest()) == []
    assert all(gradient is live[name] for name, gradient in gradients(ctx.model).items())
    assert [buffer.data_ptr() for buffer in ctx.model.buffers()] == buffers


def test_measurements_of_one_call_share_a_dropout_mask():
    ctx = context()
    assert_equal(ctx.compute_batch_gradients(), ctx.compute_batch_gradients())
    assert ctx.compute_batch_loss() == ctx.compute_batch_loss()
    slope = ctx.compute_batch_gradients()
    loss = ctx.compute_batch_loss()
    ctx.apply_perturbation(slope, -1e-3)
    predicted = -1e-3 * sum(value.square().sum() for value in slope.values())
    assert (ctx.compute_batch_loss() - loss).item() == pytest.approx(predicted.item(), rel=0.05)


def test_gradients_outlive_the_measurement():
    ctx = context()
    measured = ctx.compute_batch_gradients()
    copy = copied(measured)
    ctx.run_training_epoch(ctx.loader)
    assert_equal(measured, copy)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_full_gradient_weights_batches_by_rows(accumulation_steps):
    """The gradient matches that of all rows, though the last batch is smaller, with and without accumulation."""
    ctx = context(plain_model().double(), accumulation_steps=accumulation_steps)
    all_rows = ctx.loader._tensors
    parameters = trainable(ctx.model)
    expected = torch.autograd.grad(mean_loss(ctx.model, all_rows), list(parameters.values()))
    expected = dict(zip(parameters, expected, strict=True))
    for measured in (ctx.compute_gradients(), ctx.compute_batch_gradients(all_rows)):
        assert_close(measured, expected, rtol=1e-12, atol=1e-14)
    assert ctx.compute_batch_loss(all_rows).item() == pytest.approx(mean_loss(ctx.model, all_rows).item(), rel=1e-12)


def test_unoptimized_parameter_does_not_accumulate_gradients():
    """The full gradient of a parameter outside the optimizer matches autograd."""
    ctx = context(plain_model().double())
    ctx._task.optimizer.param_groups[0]["params"].pop()
    expected = torch.autograd.grad(mean_loss(ctx.model, ctx.loader._tensors), ctx.model[2].bias)
    torch.testing.assert_close(ctx.compute_gradients()["2.bias"], expected[0], rtol=1e-12, atol=1e-14)


def test_missing_batch_is_refused():
    """Without a current batch, each method asks for one."""
    ctx = context()
    ctx._state.loop.batch = None
    for verb in (ctx.compute_batch_loss, ctx.compute_batch_gradients, ctx.take_step):
        with pytest.raises(LoopscopeError, match="No batch is current at this hook point; pass a batch"):
            verb()


def hand_written_epoch(ctx: ModelDataContext, *, per_step: bool) -> dict[str, Tensor]:
    """Train one epoch with a minimal loop and return the mean of its gradients."""
    optimizer, step_gradients = ctx._task.optimizer, []
    inputs, targets = ctx.loader._tensors
    for start in range(0, ROWS, 4):
        optimizer.zero_grad()
        functional.cross_entropy(ctx.model(inputs[start : start + 4]), targets[start : start + 4]).backward()
        step_gradients.append(copied(gradients(ctx.model)))
        optimizer.step()
        if per_step:
            ctx._task.scheduler.step()
    return {name: torch.stack([step[name] for step in step_gradients]).mean(dim=0) for name in step_gradients[0]}


@pytest.mark.parametrize(("loop", "interval"), [("epoch", "epoch"), ("epoch", "step"), ("step", "epoch")])
def test_training_epoch_matches_handwritten_loop(loop, interval):
    """Mean gradients and state match, with the scheduler stepped per epoch or per step."""
    ctx, other = context(loop=loop, scheduler_interval=interval), context()
    seed_everything(5)
    mean_gradient = ctx.run_training_epoch(ctx.loader)
    seed_everything(5)
    expected = hand_written_epoch(other, per_step="step" in (loop, interval))
    assert_close(mean_gradient, expected, rtol=1e-5, atol=1e-7)
    changed = differing(other._state.digest(), ctx._state.digest())
    assert {name.split("/")[0] for name in changed} == {"gradients"}
    assert all(parameter.grad is not None for parameter in ctx.model.parameters())


def test_epoch_without_steps_only_averages_batch_gradients():
    """With step=False, the digest of the state stays the same."""
    ctx = context(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    before = ctx._state.digest()
    mean_gradient = ctx.run_training_epoch(ctx.loader, step=False)
    assert differing(before, ctx._state.digest()) == []
    batch_gradients = [ctx.compute_batch_gradients(batch) for batch in ctx.loader.batches(0)]
    names = batch_gradients[0].keys()
    expected = {name: torch.stack([gradient[name] for gradient in batch_gradients]).mean(dim=0) for name in names}
    assert_close(mean_gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("loop", "interval"), [("epoch", "epoch"), ("epoch", "step"), ("step", "epoch")])
def test_steps_over_batches_match_training_epoch(loop, interval):
    """take_step on each batch gives the same state bit for bit, and detached scalar losses."""
    ctx, other = context(loop=loop, scheduler_interval=interval), context(loop=loop, scheduler_interval=interval)
    seed_everything(5)
    losses = [ctx.take_step(batch) for batch in ctx.loader.batches(0)]
    seed_everything(5)
    other.run_training_epoch(other.loader)
    assert differing(other._state.digest(), ctx._state.digest()) == []
    fresh = context()
    seed_everything(5)
    assert losses[0] == mean_loss(fresh.model, next(ctx.loader.batches(0)))
    assert all(loss.ndim == 0 and not loss.requires_grad for loss in losses)


@pytest.mark.parametrize("tensor", [False, True])
def test_step_learning_rates_apply_to_that_step_only(tensor):
    """The optimizer keeps its learning rate object and the scheduler its state."""
    ctx, other = context(loop="step"), context(loop="step")
    if tensor:
        ctx._task.optimizer.param_groups[0]["lr"] = torch.tensor(0.05, dtype=torch.float64)
    learning_rate, scheduler = ctx._task.optimizer.param_groups[0]["lr"], ctx._task.scheduler.state_dict()
    with ctx._state.streams.preserved():
        ctx.take_step(learning_rates=[0.3])
    assert ctx._task.optimizer.param_groups[0]["lr"] is learning_rate
    assert learning_rate == 0.05
    assert ctx._task.scheduler.state_dict() == scheduler
    other._task.optimizer.param_groups[0]["lr"] = 0.3
    other.take_step()
    assert_close(copied(trainable(ctx.model)), copied(trainable(other.model)), rtol=1e-6, atol=1e-8)


def test_step_options_apply_to_that_step_only():
    """A factor of the learning rate and a weight decay act like those of the optimizer, which are restored."""
    ctx, other = context(), context()
    group, changed = ctx._task.optimizer.param_groups[0], other._task.optimizer.param_groups[0]
    options = {name: value for name, value in group.items() if name != "params"}
    with ctx._state.streams.preserved():
        ctx.take_step(rate_factor=6.0, weight_decay=0.1)
    assert {name: value for name, value in group.items() if name != "params"} == options
    changed["lr"], changed["weight_decay"] = changed["lr"] * 6.0, 0.1
    other.take_step()
    assert_close(copied(trainable(ctx.model)), copied(trainable(other.model)), rtol=1e-6, atol=1e-8)


def test_missing_learning_rate_has_no_factor():
    ctx = context()
    ctx._task.optimizer.param_groups[0]["lr"] = None
    with pytest.raises(LoopscopeError, match=r"has no numeric learning rate .* cannot change it"):
        ctx.take_step(rate_factor=0.5)


def test_failed_step_restores_learning_rates_and_gradients():
    """A wrong number of learning rates is refused."""
    ctx = context()
    live = gradients(ctx.model)

    def failing(model, batch):
        raise ValueError("no loss")

    ctx._task.compute_loss = failing
    with pytest.raises(ValueError, match="no loss"):
        ctx.take_step(learning_rates=[0.3])
    assert ctx._task.optimizer.param_groups[0]["lr"] == 0.05
    assert all(gradient is live[name] for name, gradient in gradients(ctx.model).items())
    with pytest.raises(LoopscopeError, match="given 2 learning rates, but the optimizer has 1 parameter groups"):
        ctx.take_step(learning_rates=[0.3, 0.3])


def test_empty_loader_is_refused():
    ctx = context()
    empty = TensorLoader(ctx.loader._tensors, 4, lambda epoch: torch.arange(0))
    empty.batches = lambda epoch, start=0: iter(())
    with pytest.raises(LoopscopeError, match="could be taken: it has no batches"):
        ctx.run_training_epoch(empty)
    with pytest.raises(LoopscopeError, match="no batches, so no mean over batches can be computed"):
        ctx.hessian_vector_product(trainable(ctx.model), loader=empty)


def order(ctx: ModelDataContext) -> list[float]:
    return [x for inputs, _ in ctx.get_shuffled_loader().batches(0) for x in inputs[:, 0].tolist()]


def test_shuffled_order_depends_only_on_call_stream():
    """Draws in a branch do not matter; another hook, point or step gives another order."""
    ctx, same = context(), context()
    first, second = order(ctx), order(ctx)
    assert sorted(first) == sorted(second) == sorted(ctx.loader._tensors[0][:, 0].tolist())
    assert first != second
    with same.branch():
        torch.rand(5)
        assert order(same) == first
    assert order(same) == second
    for stream in (("other", "PRE_STEP", 1), ("probe", "POST_STEP", 1), ("probe", "PRE_STEP", 2)):
        assert order(context(stream=stream)) not in (first, second)


def test_perturbation_changes_only_named_parameters():
    """An unknown parameter name is refused."""
    ctx = context()
    before = copied(dict(ctx.model.named_parameters()))
    ctx.apply_perturbation({"0.bias": torch.ones(8)}, -0.5)
    assert_equal(copied(dict(ctx.model.named_parameters())), before | {"0.bias": before["0.bias"] - 0.5})
    with pytest.raises(UsageError, match=r"Unknown parameter '0\.bia'"):
        ctx.apply_perturbation({"0.bia": torch.ones(8)}, 1.0)


def test_optimizer_state_is_read_only_by_parameter_name():
    """The values are the tensors of the optimizer, not copies."""
    ctx = context()
    assert ctx.optimizer_state == {}
    ctx.run_training_epoch(ctx.loader)
    optimizer_state = ctx.optimizer_state
    assert optimizer_state.keys() == trainable(ctx.model).keys()
    assert optimizer_state["0.weight"]["exp_avg"] is ctx._task.optimizer.state[ctx.model[0].weight]["exp_avg"]
    with pytest.raises(TypeError):
        optimizer_state["0.weight"]["exp_avg"] = None
    assert ctx.device == torch.device("cpu")


CHANGING = {
    "restore_checkpoint": lambda ctx: ctx.restore_checkpoint(ctx.save_checkpoint()),
    "branch": lambda ctx: ctx.branch().__enter__(),
    "restore_pre_epoch": lambda ctx: ctx.restore_pre_epoch(),
    "apply_perturbation": lambda ctx: ctx.apply_perturbation(trainable(ctx.model), 1.0),
    "take_step": lambda ctx: ctx.take_step(),
    "run_training_epoch": lambda ctx: ctx.run_training_epoch(ctx.loader),
    "finite_difference": lambda ctx: ctx.hessian_vector_product(trainable(ctx.model), method="finite_difference"),
}


@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("verb", CHANGING)
def test_read_only_hook_cannot_change_state(verb):
    """Every changing method raises ReadOnlyError and leaves the digest as it was."""
    ctx = context(mutates=False)
    before = ctx._state.digest()
    with pytest.raises(ReadOnlyError, match=rf"{verb}.* changes the training state, but the hook declares mutates"):
        CHANGING[verb](ctx)
    assert differing(before, ctx._state.digest()) == []


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("model", ["batchnorm_mlp", "transformer", "tied"])
def test_reading_methods_pass_tripwire_and_audit(model):
    """A read-only hook that uses all of them leaves the run its bytes."""

    def read(run_ctx, ctx):
        if run_ctx.batch_data is not None:
            ctx.compute_batch_loss()
            ctx.hessian_vector_product(ctx.compute_batch_gradients())
        ctx.compute_gradients()
        ctx.run_training_epoch(ctx.get_shuffled_loader(), step=False)
        ctx.discard_checkpoint(ctx.save_checkpoint())
        return {"states": len(ctx.optimizer_state)}

    case = Case(model, "adamw_fused")
    assert_same_bytes(train(case, [ReadOnlyHook(read)]), case)
