"""Loops that make no call of loopscope: their steps, losses and gradients are observed, and no bit changes."""

import json
import warnings
from pathlib import Path
from threading import Thread
from typing import Any

import loopscope
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.framework.observing.loops import (
    ALL_POINTS,
    LOOPS,
    STEPS,
    accumulating,
    clipping,
    clipping_values,
    dropping,
    evaluating,
    made,
    per_sample,
    plain,
    rows,
    scaled,
    seen,
    steps_of,
    trained,
    two_losses,
    weights,
    without_backward,
)
from tests.support import SpyHook, at

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
GROUPS = ["health", "observers"]


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", LOOPS)
def test_unedited_loops_keep_their_bytes(name: str, group: str, tmp_path: Path) -> None:
    """A loop within ``with attach(...)`` ends with the bytes of the loop alone."""
    bare, _ = trained(LOOPS[name])
    found, scope = trained(LOOPS[name], tmp_path, hooks=None, with_hooks=group)
    assert torch.equal(bare, found)
    assert steps_of(scope) == STEPS


@pytest.mark.parametrize(
    "loop", [plain, accumulating, clipping, two_losses, evaluating, dropping, without_backward, per_sample]
)
def test_every_point_is_reached_in_every_step(loop: Any, tmp_path: Path) -> None:
    found = seen(loop, tmp_path, lambda ctx: None)
    points = [(point, step) for point, step, _ in found if point != "PRE_STEP"]
    assert points == [(point.name, step) for step in range(1, STEPS + 1) for point in ALL_POINTS[1:]]
    assert {step for point, step, _ in found if point == "PRE_STEP"} == {*range(1, STEPS + 1)}


@pytest.mark.parametrize("loop", [clipping, clipping_values, without_backward])
def test_gradients_are_seen_before_they_are_clipped(loop: Any, tmp_path: Path) -> None:
    norms = seen(loop, tmp_path, lambda ctx: torch.cat([p.grad.flatten() for p in ctx.model.parameters()]).norm())
    by_point = {name: [norm for point, _, norm in norms if point == name] for name in ("POST_BACKWARD", "PRE_UPDATE")}
    assert all(norm > 1e-2 for norm in by_point["POST_BACKWARD"])
    assert all(norm < 2e-3 for norm in by_point["PRE_UPDATE"])


def test_losses_of_micro_batches_add_up(tmp_path: Path) -> None:
    """The loss of a step is the sum of what was differentiated."""
    totals: list[float] = []

    def counting(model: nn.Module, optimizer: Any) -> None:
        for step in range(STEPS):
            totals.append(0.0)
            for _ in range(1 + step % 3):
                inputs, targets = rows()
                loss = functional.cross_entropy(model(inputs), targets) / 3
                loss.backward()
                totals[-1] += loss.item()
            optimizer.step()
            optimizer.zero_grad()

    found = seen(counting, tmp_path, lambda ctx: ctx.loss)
    losses = [loss.item() for point, _, loss in found if point == "POST_STEP"]
    assert losses == pytest.approx(totals)


def test_losses_of_returned_gradients_are_recorded(tmp_path: Path) -> None:
    """Those of ``torch.autograd.grad``, unless a backward pass shows that they were only measured."""
    totals: list[float] = []

    def mixed(model: nn.Module, optimizer: Any) -> None:
        for step in range(STEPS):
            inputs, targets = rows()
            loss = functional.cross_entropy(model(inputs), targets)
            found = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            optimizer.zero_grad()
            if step % 2:
                loss = 2 * loss
                loss.backward()
            else:
                for weight, gradient in zip(model.parameters(), found, strict=True):
                    weight.grad = gradient
            totals.append(loss.item())
            optimizer.step()

    found = seen(mixed, tmp_path, lambda ctx: (ctx.loss, len(ctx.batch_data)))
    assert [(loss.item(), size) for point, _, (loss, size) in found if point == "POST_STEP"] == [
        (total, 6) for total in totals
    ]


def test_missing_loss_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        trained(per_sample, tmp_path, display="normal")
    assert "no backward pass, so the record has no loss" in " ".join(capsys.readouterr().out.split())


def test_batches_are_the_arguments_of_the_passes(tmp_path: Path) -> None:
    found = seen(accumulating, tmp_path, lambda ctx: ctx.batch_data)
    counts = [len(batch) if isinstance(batch, list) else 1 for point, _, batch in found if point == "POST_BACKWARD"]
    assert counts == [1 + step % 3 for step in range(STEPS)]


def test_dropped_passes_belong_to_no_step(tmp_path: Path) -> None:
    """Gradients that are cleared before an update leave no loss behind."""
    found = seen(dropping, tmp_path, lambda ctx: ctx.loss)
    assert all(loss.item() < 3 for point, _, loss in found if point == "POST_STEP")


def test_losses_are_recorded_without_their_scale(tmp_path: Path) -> None:
    found = seen(scaled, tmp_path, lambda ctx: ctx.loss)
    losses = [loss.item() for point, _, loss in found if point == "POST_BACKWARD"]
    assert all(0.1 < loss < 10 for loss in losses)


def test_schedulers_and_scalers_are_found(tmp_path: Path) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(made().parameters(), lr=0.1), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with loopscope.attach(model, optimizer, hooks=[], out=tmp_path / "run", display="none") as scope:
        plain(model, optimizer)
    task = scope._attached.driver.task
    assert (task.scheduler, task.scaler) == (scheduler, scaler)
    assert other is not task.scheduler


def test_optimizer_is_found_at_the_first_pass(tmp_path: Path) -> None:
    model, other = made(), made()
    with loopscope.attach(model, hooks=[], out=tmp_path / "run", display="none") as scope:
        torch.optim.SGD(other.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain(model, optimizer)
    assert steps_of(scope) == STEPS
    assert scope._attached.driver.task.optimizer is optimizer


def test_closures_are_observed(tmp_path: Path) -> None:
    def run(folder: Path | None) -> tuple[torch.Tensor, Any]:
        model = made()
        lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        torch.manual_seed(1)

        def train() -> None:
            for _ in range(STEPS):
                inputs, targets = rows()

                def closure(inputs: Any = inputs, targets: Any = targets) -> torch.Tensor:
                    lbfgs.zero_grad()
                    loss = functional.cross_entropy(model(inputs), targets)
                    loss.backward()
                    return loss

                lbfgs.step(closure)

        if folder is None:
            train()
            return weights(model), None
        with loopscope.attach(model, lbfgs, with_hooks="health", out=folder / "run", display="none") as scope:
            train()
        return weights(model), scope

    found, scope = run(tmp_path)
    assert torch.equal(run(None)[0], found)
    assert steps_of(scope) == STEPS
    assert "training_metrics/loss" in scope.last_metrics()


def test_adversaries_are_separate_trainings(tmp_path: Path) -> None:
    """The generator's loss also reaches the discriminator, whose gradients of it are cleared."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (generator, critic)]
    options: dict[str, Any] = {"hooks": [], "display": "none"}
    first = loopscope.attach(generator, optimizers[0], out=tmp_path / "generator", **options)
    second = loopscope.attach(critic, optimizers[1], out=tmp_path / "critic", **options)
    losses: list[float] = []
    for _ in range(STEPS):
        optimizers[0].zero_grad()
        critic(generator(torch.randn(4, 2))).mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        loss = critic(torch.randn(4, 2)).square().mean()
        loss.backward()
        optimizers[1].step()
        losses.append(loss.item())
    first.close()
    second.close()
    assert (steps_of(first), steps_of(second)) == (STEPS, STEPS)
    assert second.last_metrics()["training_metrics/loss"] == pytest.approx(losses[-1])


def test_losses_of_other_models_leave_no_finding(tmp_path: Path) -> None:
    """The critic's loss runs the generator, does not reach it, and comes before its gradients are cleared."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    first, second = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (generator, critic))
    with loopscope.attach(generator, first, out=tmp_path / "generator", display="none") as scope:
        for _ in range(STEPS):
            second.zero_grad()
            (critic(generator(torch.randn(4, 2)).detach()) - critic(torch.randn(4, 2))).mean().backward()
            second.step()
            first.zero_grad()
            critic(generator(torch.randn(4, 2))).mean().backward()
            first.step()
        assert "gradients-not-zeroed" not in {finding.id for finding in scope.diagnose().findings}
    assert steps_of(scope) == STEPS


def test_rare_optimizer_keeps_every_step(tmp_path: Path) -> None:
    """The second of two optimizers takes part in every second step."""
    model = made()
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 4)]
    points: list[str] = []
    spy = at(SpyHook, *ALL_POINTS)(lambda ctx: points.append(ctx.hook_point.name))
    with loopscope.attach(model, optimizers, hooks=[spy], out=tmp_path / "run", display="none") as scope:
        for step in range(STEPS):
            inputs, targets = rows()
            model.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            for optimizer in optimizers[: 1 + step % 2]:
                optimizer.step()
    assert steps_of(scope) == STEPS
    assert points == [point.name for point in ALL_POINTS] * STEPS


def test_nothing_remains_after_scopes_close(tmp_path: Path) -> None:
    """Also if they close in the order in which they were opened, and after an exception."""
    before = torch.autograd._engine_run_backward, torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype
    models = [made(), made(1)]
    scopes = []
    for index, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        folder = tmp_path / str(index)
        scopes.append(loopscope.attach(model, optimizer, hooks=[], out=folder, display="none"))
        plain(model, optimizer)
    assert torch.autograd._engine_run_backward is not before[0]
    with pytest.raises(ZeroDivisionError), scopes[0]:
        raise ZeroDivisionError
    scopes[1].close()
    assert (torch.autograd._engine_run_backward, torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype) == before
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_failed_passes_are_not_counted(tmp_path: Path) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loopscope.attach(model, optimizer, hooks=[], out=tmp_path / "run", display="none") as scope:
        loss = functional.cross_entropy(model(rows()[0]), rows()[1])
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        optimizer.step()
        plain(model, optimizer)
    assert steps_of(scope) == STEPS + 1


def test_reported_numbers_are_recorded(tmp_path: Path) -> None:
    """Those of an evaluation are also the newest evaluation for hooks."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loopscope.attach(model, optimizer, hooks=[], out=tmp_path / "run", display="none") as scope:
        for value in (0.5, 0.25):
            plain(model, optimizer)
            scope.log(val_loss=value, lr=1e-3, name="text")
    lines = [json.loads(line) for path in (tmp_path / "run").glob("run*.jsonl") for line in path.open()]
    values = [line["reported/val_loss"] for line in lines if "reported/val_loss" in line]
    assert values == [{"steps": [6, 12], "values": [0.5, 0.25]}]
    assert scope._attached.driver.loop.evaluation == {"val_loss": 0.25}


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_losses_of_checkpointed_models_are_recorded(is_reentrant: bool, tmp_path: Path) -> None:
    """Reentrant checkpoints run a backward pass within that of the loss."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loopscope.attach(model, optimizer, hooks=[], out=tmp_path / "run", display="none") as scope:
        for _ in range(STEPS):
            inputs, targets = rows()
            outputs = checkpoint(model, inputs.requires_grad_(), use_reentrant=is_reentrant)
            loss = functional.cross_entropy(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert steps_of(scope) == STEPS
    assert scope.last_metrics()["training_metrics/loss"] == pytest.approx(loss.item())


def test_passes_of_other_threads_are_not_counted(tmp_path: Path) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = rows()
    earlier = functional.cross_entropy(model(inputs), targets)
    with loopscope.attach(model, optimizer, hooks=[], out=tmp_path / "run", display="none") as scope:
        loss = functional.cross_entropy(model(inputs), targets)
        other = Thread(target=earlier.backward)
        other.start()
        other.join()
        loss.backward()
        optimizer.step()
    assert steps_of(scope) == 1
    assert scope.last_metrics()["training_metrics/loss"] == pytest.approx(loss.item())


def test_steps_that_are_asked_for_are_a_success(tmp_path: Path) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"hooks": [], "out": tmp_path / "run", "display": "none"}
    with pytest.raises(SystemExit), loopscope.attach(model, optimizer, stop_after=3, **options):
        plain(model, optimizer)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "completed"


def test_gradients_cleared_before_the_update_are_reported(tmp_path: Path) -> None:
    def clearing(model: nn.Module, optimizer: Any) -> None:
        for _ in range(STEPS):
            inputs, targets = rows()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.zero_grad()
            optimizer.step()

    _, scope = trained(clearing, tmp_path, hooks=None, with_hooks="health")
    assert "gradients-zeroed-too-early" in [finding.id for finding in scope.diagnose()]


def findings_of(loop: Any, folder: Path) -> list[str]:
    """Return the ids of the findings at the end of a loop."""
    _, scope = trained(loop, folder, hooks=None, with_hooks="health")
    return [finding["id"] for finding in json.loads((scope.folder / "summary.json").read_text())["findings"]]


@pytest.mark.parametrize("clears", [True, False])
def test_missing_updates_are_reported(clears: bool, tmp_path: Path) -> None:
    """The loop has no call of ``optimizer.step()``."""

    def never(model: nn.Module, optimizer: Any) -> None:
        for _ in range(STEPS):
            inputs, targets = rows()
            if clears:
                optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()

    assert findings_of(never, tmp_path) == ["optimizer-not-stepped"]


@pytest.mark.parametrize(("divides", "clears"), [(True, True), (True, False), (False, True)])
def test_gradients_cleared_between_micro_batches_are_reported(divides: bool, clears: bool, tmp_path: Path) -> None:
    """Not if the losses are not divided by the number of passes: then the first pass may be an attack."""

    def twice(model: nn.Module, optimizer: Any) -> None:
        for _ in range(STEPS):
            for part in range(2):
                inputs, targets = rows()
                if clears or not part:
                    optimizer.zero_grad()
                loss = functional.cross_entropy(model(inputs), targets)
                (loss / 2 if divides else loss).backward()
            optimizer.step()

    assert ("gradients-zeroed-too-early" in findings_of(twice, tmp_path)) is (divides and clears)


@pytest.mark.filterwarnings("error:The .grad attribute")
def test_inner_updates_belong_to_their_step(tmp_path: Path) -> None:
    """Passes with other weights in the model's place, as in MAML, of which torch would warn if hooks read them."""
    losses: list[float] = []

    def meta(model: nn.Module, optimizer: Any) -> None:
        for _ in range(STEPS):
            weights: dict[str, Tensor] = dict(model.named_parameters())
            inputs, targets = rows()
            for _ in range(3):
                loss = functional.cross_entropy(functional_call(model, weights, (inputs,)), targets)
                gradients = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
                weights = {name: weights[name] - 0.1 * item for name, item in zip(weights, gradients, strict=True)}
            loss = functional.cross_entropy(functional_call(model, weights, (inputs,)), targets)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    _, scope = trained(meta, tmp_path, hooks=None, with_hooks="health", log_every=1)
    assert steps_of(scope) == STEPS
    assert scope.last_metrics()["training_metrics/loss"] == pytest.approx(losses[-1])


def test_evaluations_in_train_mode_are_reported(tmp_path: Path) -> None:
    """If the script logs the numbers of a validation after passes without gradients in train mode."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loopscope.attach(model, optimizer, out=tmp_path / "run", display="none") as scope:
        for _ in range(3):
            plain(model, optimizer)
            with torch.no_grad():
                loss = functional.cross_entropy(model(rows()[0]), rows()[1])
            scope.log(val_loss=loss)
    assert "evaluation-in-train-mode" in [finding.id for finding in scope.diagnose()]
