"""Optimizers with closures, schedulers with arguments, and combinations that are refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from loopscope.checkpoints.content import load_checkpoint, save_checkpoint
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, StatePart
from loopscope.loops import NoPauses, epoch_loop, step_loop
from loopscope.state import without_on_demand
from loopscope.training import forward_backward, takes_closure
from loopscope.training_hooks import EmbeddingProvenance, GradClip, Norms, TrainingMetrics
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.support import LOOPS, OPTIMIZERS, ActingHook, Case, SpyHook, at, build, differences, train
from tests.support.cases import matrix
from tests.support.models import MODELS

STEPS = 3
PLAIN = [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor]


class Sharpness(torch.optim.SGD):
    """Sharpness-aware minimisation, which moves the weights before it evaluates the loss."""

    @torch.no_grad()
    def step(self, closure):
        leaves = [leaf for group in self.param_groups for leaf in group["params"]]
        moves = [0.05 * leaf.grad.sign() for leaf in leaves]
        torch._foreach_add_(leaves, moves)
        loss = torch.enable_grad()(closure)()
        torch._foreach_sub_(leaves, moves)
        super().step()
        return loss


class Asserting(Sharpness):
    """Sharpness as published by its authors: the closure has a default value, but is required."""

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step."""
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        return super().step(closure)


class Calling(Sharpness):
    """Sharpness with a default closure and without an explicit check."""

    def step(self, closure=None):
        return super().step(closure)


CLOSURES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.2, max_iter=4, history_size=3),
    "wolfe": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe"),
    "sharpness": lambda parameters: Sharpness(parameters, lr=0.1),
}


@pytest.fixture(autouse=True, scope="module")
def optimizers():
    with pytest.MonkeyPatch.context() as patch:
        for name, make in CLOSURES.items():
            patch.setitem(OPTIMIZERS, name, make)
        yield


def disturbing() -> list[Any]:
    """Return hooks that measure and train."""

    def disturb(run_ctx, model_ctx) -> None:
        model_ctx.compute_batch_gradients(run_ctx.batch_data)
        model_ctx.take_step(run_ctx.batch_data)
        if run_ctx.step == 1:
            model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())

    observer = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: {"loss": ctx.forward(ctx.batch_data[0]).output.sum()})
    intervention = at(ActingHook, HookPoint.POST_BACKWARD, needs_pre_epoch_state=False)(disturb)
    return [intervention, observer, Norms(), TrainingMetrics()]


def by_hand(case: Case, pieces: int) -> dict[str, Tensor]:
    """Train with a closure as in torch's documentation."""
    task, _ = build(case, steps=STEPS, accumulation_steps=pieces)
    for step in range(STEPS):
        batch = [*task.loader.batches(step // 3)][step % 3]
        if "wolfe" != case.optimizer != "lbfgs":
            forward_backward(task, batch)
        task.optimizer.step(lambda batch=batch: forward_backward(task, batch))
        if case.loop == "step" or step % 3 == 2:
            task.scheduler.step()
    return task.model.state_dict()


@pytest.mark.longer
@pytest.mark.guarantee("every-training-mode")
@matrix("optimizer, loop, model, pieces", CLOSURES, LOOPS, MODELS, [1, 2])
def test_closure_steps_match_torch_with_hooks(optimizer, loop, model, pieces):
    """The optimizer evaluates the loss several times; hooks measure and train in between."""
    case = Case(model, optimizer, loop)
    bare, hooked = (train(case, hooks, steps=STEPS, accumulation_steps=pieces) for hooks in ([], disturbing()))
    assert [differences(*pair) for pair in zip(bare.digests, hooked.digests, strict=True)] == [[]] * STEPS
    assert differences(bare.final, hooked.final) == []
    for name, value in by_hand(case, pieces).items():
        assert torch.equal(value, bare.task.model.state_dict()[name]), name


@pytest.mark.guarantee("every-training-mode")
def test_hooks_see_first_and_last_closure_gradients():
    """POST_BACKWARD and PRE_UPDATE see the first evaluation, POST_STEP sees the last gradients."""
    losses, calls = [], []

    def compute_loss(model, batch):
        losses.append(model(batch[0]).square().mean())
        return losses[-1]

    record = lambda ctx: calls.append((ctx.hook_point.name, len(losses), ctx.model[0].weight.grad.clone(), ctx.loss))
    spy = at(SpyHook, HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE, HookPoint.POST_STEP)(record)
    train(
        Case(optimizer="lbfgs"),
        [spy],
        steps=1,
        introduce=lambda task, state: setattr(task, "compute_loss", compute_loss),
    )
    _, count, gradient, loss = calls[0]
    _, update_count, update_gradient, _ = calls[1]
    _, step_count, step_gradient, step_loss = calls[2]
    assert count == update_count == 1 < step_count
    assert torch.equal(gradient, update_gradient)
    assert not torch.equal(gradient, step_gradient)
    assert loss == step_loss == losses[0]


def test_tap_sees_only_the_first_closure_evaluation():
    metrics = [
        train(Case("tied", optimizer), [EmbeddingProvenance()], steps=1).sink.rows("embedding_provenance")
        for optimizer in ("lbfgs", "sgd_momentum")
    ]
    first = [[row for row in rows if row[2] == 1] for rows in metrics]
    assert first[0] == first[1]
    assert first[0]


class OneSave(NoPauses):
    """Saves one checkpoint, after the given step."""

    def __init__(self, manager, path, step):
        self.manager, self.path, self.step = manager, path, step

    def pause(self, loop, *, unit_ended):
        if loop.step == self.step and (unit_ended or not self.manager.counts_epochs):
            state = self.manager.state
            save_checkpoint(self.path, state, {}, state.streams.save())


@pytest.mark.guarantee("every-training-mode")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("optimizer", ["lbfgs", "adamw_fused"])
def test_closure_run_resumes_with_plateau_scheduler(optimizer, loop, tmp_path):
    """The checkpoint is saved at step 6 of 9."""
    case, run = Case(optimizer=optimizer, loop=loop), epoch_loop if loop == "epoch" else step_loop
    finals = []
    for resumed in (False, True):
        task, state = with_plateau(*build(case, steps=9))
        manager = HookManager([Norms()], task, state, loop=loop)
        if resumed:
            load_checkpoint(tmp_path / "saved", state)
            assert state.loop.step == 6
        run(task, manager, pauses=NoPauses() if resumed else OneSave(manager, tmp_path / "saved", 6))
        finals.append(without_on_demand(state.digest()))
    assert differences(*finals) == []


@pytest.mark.parametrize("kind", [Asserting, Calling])
def test_optimizer_with_undeclared_closure_is_refused(kind):
    """The error asks for a closure parameter without a default."""

    def introduce(task, state):
        task.optimizer = state.optimizer = kind(task.model.parameters(), lr=0.1)

    sentence = rf"(?s){kind.__name__}.step\(\) failed without a closure \(.*remove the default of its parameter closure"
    with pytest.raises(UsageError, match=sentence):
        train(Case(), introduce=introduce)


def test_optimizer_without_param_groups_is_refused():
    class WrapperWithoutGroups:
        step = zero_grad = print

    with pytest.raises(UsageError, match="WrapperWithoutGroups has no param_groups, which hooks and checkpoints need"):
        replace(build(Case())[0], optimizer=WrapperWithoutGroups())


def test_closure_is_passed_only_when_required():
    parameters = [nn.Parameter(torch.ones(1))]
    assert all(takes_closure(make(parameters)) for make in CLOSURES.values())
    assert not any(takes_closure(make(parameters)) for make in PLAIN)


def with_plateau(task, state):
    """Reduce the learning rate whenever the accuracy does not improve."""
    task.scheduler = state.scheduler = ReduceLROnPlateau(task.optimizer, mode="max", patience=0, factor=0.5)
    task.scheduler_metric = "val_acc"
    return task, state


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("every-training-mode")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_metric_scheduler_steps_after_every_evaluation(loop, interval):
    """Hooks do not change the learning rates of ReduceLROnPlateau."""
    accuracies, rates = [], {}

    def evaluate(model):
        accuracies.append([0.5, 0.6, 0.6, 0.6, 0.6][len(accuracies)])
        return {"val_acc": accuracies[-1]}

    for name, hooks in (("bare", []), ("hooked", disturbing())):
        accuracies.clear()
        run = train(Case(loop=loop), hooks, steps=9, evaluate=evaluate, eval_every=3 if loop == "step" else 1,
                    scheduler_interval=interval, introduce=with_plateau)  # fmt: skip
        rates[name] = run.task.optimizer.param_groups[0]["lr"], run.final
        assert run.task.scheduler.best == 0.6
        assert run.task.scheduler.last_epoch == len(accuracies) == 3
    assert rates["bare"] == rates["hooked"]
    assert rates["bare"][0] == 0.01 / 2


class Counting:
    """A scheduler like those of timm, whose step takes the number of finished epochs or steps."""

    def __init__(self, optimizer):
        self.optimizer, self.counts = optimizer, []

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.counts.append(epoch)
        self.optimizer.param_groups[0]["lr"] = 0.1 / epoch

    def state_dict(self) -> dict[str, Any]:
        return {"counts": [*self.counts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = [*state["counts"]]


@pytest.mark.some_rows(2)
@pytest.mark.parametrize(
    ("loop", "interval", "count"), [("epoch", "epoch", 2), ("epoch", "step", 6), ("step", "epoch", 6)]
)
def test_scheduler_receives_its_progress(loop, interval, count):
    """The step method gets the number of finished epochs or steps, depending on the interval."""

    def introduce(task, state):
        task.scheduler = state.scheduler = Counting(task.optimizer)

    run = train(Case(loop=loop), disturbing(), steps=6, scheduler_interval=interval, introduce=introduce)
    assert run.task.scheduler.counts == [*range(1, count + 1)]


class Strange(Counting):
    """A scheduler that requires an unsupported argument."""

    def step(self, epoch: int, loss: float) -> None:
        """Do nothing."""


REFUSED = {
    "a GradScaler": (
        "LBFGS evaluates the loss several times a step, which a GradScaler .float16. does not support",
        lambda model, make: {"optimizer": make("lbfgs"), "scaler": torch.amp.GradScaler("cpu")},
    ),
    "no evaluation": (
        "ReduceLROnPlateau steps after evaluations, but eval_every is 0",
        lambda model, make: {"scheduler": ReduceLROnPlateau(make("sgd_momentum")), "eval_every": 0},
    ),
    "a strange scheduler": (
        r"Strange.step\(\) requires epoch, loss; supported are no argument",
        lambda model, make: {"scheduler": Strange(make("sgd_momentum"))},
    ),
    "lazy modules": (
        r"whose shapes are unknown before the first forward pass: 0.weight, 0.bias, 1.weight and \d more. Pass",
        lambda model, make: {"model": nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())},
    ),
    "scripted modules": (
        r"TorchScript modules, whose state TorchScript keeps internally: 0. Use the original",
        lambda model, make: {"model": nn.Sequential(torch.jit.ScriptModule())},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_incompatible_components_are_refused(name):
    """TrainingTask refuses LBFGS with a GradScaler, some schedulers, and lazy or scripted modules."""
    sentence, fields = REFUSED[name]
    task, _ = build(Case())
    with pytest.raises(UsageError, match=sentence):
        type(task)(**{**vars(task), **fields(task.model, lambda kind: OPTIMIZERS[kind](task.model.parameters()))})


@pytest.mark.parametrize("part", [StatePart.GRADIENTS, StatePart.OPTIMIZER])
def test_gradient_commits_are_refused_with_closures(part):
    """Hooks that change gradients or optimizer state cannot be used with LBFGS."""
    hook = at(ActingHook, HookPoint.POST_BACKWARD, commits=frozenset({part}))(lambda *ctx: None)
    with pytest.raises(
        UsageError, match=f"'acting' changes the {part.value}, but LBFGS computes gradients several times"
    ):
        train(Case(optimizer="lbfgs"), [hook])
    with pytest.raises(UsageError, match="Hook 'grad_clip' changes the gradients"):
        train(Case(optimizer="lbfgs"), [GradClip(max_norm=1.0)])


def test_evaluation_without_scheduler_metric_is_refused():
    """The error lists the metrics that the evaluation returns."""

    def introduce(task, state):
        with_plateau(task, state)
        task.scheduler_metric = "val_loss"

    with pytest.raises(UsageError, match="ReduceLROnPlateau needs 'val_loss' of the evaluation, which returns val_acc"):
        train(Case(), introduce=introduce)
