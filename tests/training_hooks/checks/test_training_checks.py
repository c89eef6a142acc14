"""The hook training_checks against known mistakes and brute force."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.hooks import HookPoint, RunDataContext, StatePart
from loopscope.training_hooks.checks import TrainingChecks
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import OPTIMIZERS, ActingHook, Case, SpyHook, at, train

Metrics = dict[str, float]
ROWS, CLASSES = 8, 4
CHECKED = {1, 2, 3, 5, 10, 20}


class Net(nn.Module):
    """A network with a part that is never called, and a branch that ReLU can kill."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, CLASSES)
        self.unused, self.dropout = nn.Linear(2, 2), nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(inputs).relu())
        return logits


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 6, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator))
        for _ in range(steps)
    ]


def run(
    folder: Path,
    *,
    model: nn.Module | None = None,
    loss: Callable[[nn.Module, Any], Tensor] = mean_loss,
    data: list[Any] | None = None,
    zeroes: bool = True,
    accumulate: int = 1,
    clip: float = 0.0,
    lr: float = 0.01,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> dict[int, Metrics]:
    """Train in a custom loop, and return the metrics of the hook by step."""
    model = Net() if model is None else model
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    hook = TrainingChecks(**options)
    with loopscope.attach(
        model, optimizer, hooks=[hook], out=folder, accumulate=accumulate, display="none", sinks=["jsonl"]
    ) as scope:
        for index, batch in enumerate(scope.batches(data or batches(3 * accumulate)), start=1):
            scope.backward(loss(model, batch))
            if index % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
                optimizer.step()
                optimizer.zero_grad() if zeroes else None
    return read(folder)


def read(folder: Path) -> dict[int, Metrics]:
    """Return the metrics of the hook in a record, by step."""
    found: dict[int, Metrics] = {}
    (file,) = (path for path in folder.glob("*.jsonl") if path.name not in ("alerts.jsonl", "digests.jsonl"))
    for line in file.read_text("utf-8").splitlines():
        series = {name: value for name, value in json.loads(line).items() if name.startswith("training_checks/")}
        for name, values in series.items():
            for step, value in zip(values["steps"], values["values"], strict=True):
                found.setdefault(step, {})[name.removeprefix("training_checks/")] = value
    return found


@pytest.mark.longer
def test_steps_outside_of_checks_have_three_numbers(tmp_path: Path) -> None:
    found = run(tmp_path, data=batches(22), interval=12)
    assert sorted(found) == list(range(1, 23))
    checked = {step for step, metrics in found.items() if "update_ratio" in metrics}
    assert checked == CHECKED | {13}
    assert all(metrics.keys() == {"loss", "grad_norm", "lr"} for step, metrics in found.items() if step not in checked)


def test_sound_training_has_no_suspicious_numbers(tmp_path: Path) -> None:
    found = run(tmp_path, prepare=lambda model: model.unused.requires_grad_(False))
    for metrics in found.values():
        zeros = ("without_gradient_count", "never_gradient_count", "unchanged_count", "loss_is_summed")
        zeros += ("doubly_normalised", "lacks_log_softmax", "float16_used", "eval_mode_count", "model_in_eval")
        assert {name: metrics[name] for name in zeros} == dict.fromkeys(zeros, 0)
        assert (metrics["micro_batches"], metrics["class_count"], metrics["clip_factor"]) == (1, CLASSES, 1)
        assert metrics["uniform_loss"] == pytest.approx(math.log(CLASSES))
        assert metrics["dropout_count"] == 1


def test_parameters_without_gradient_are_named(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert [found[step]["without_gradient_count"] for step in (1, 2, 3)] == [2, 2, 2]
    assert found[3]["without_gradient/unused.weight"] == found[3]["never_gradient/unused.bias"] == 3


def test_parameters_that_a_loop_changes_are_not_missing(tmp_path: Path) -> None:
    """A target network in no optimizer is moved, as are parameters whose optimizer steps within the backward pass."""
    model = Net()
    optimizer = torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1)
    with loopscope.attach(
        model, optimizer, hooks=[TrainingChecks()], out=tmp_path, display="none", sinks=["jsonl"]
    ) as scope:
        for batch in scope.batches(batches(3)):
            scope.backward(mean_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            model.unused.weight.data.mul_(1.0001)
    found = read(tmp_path)
    assert [found[step]["outside_moved_count"] for step in (1, 2, 3)] == [0, 1, 1]
    assert {found[step]["outside_gradient_count"] for step in (1, 2, 3)} == {0}
    assert {found[step]["never_gradient_count"] for step in (1, 2, 3)} == {0}


def test_late_gradients_end_the_counts(tmp_path: Path) -> None:
    steps: list[int] = []

    def loss(model: Any, batch: Any) -> Tensor:
        steps.append(1)
        return mean_loss(model, batch) + (model.unused.weight.sum() if len(steps) == 2 else 0)

    found = run(tmp_path, loss=loss)
    assert [found[step]["without_gradient_count"] for step in (1, 2, 3)] == [2, 1, 2]
    assert [found[step]["never_gradient_count"] for step in (1, 2, 3)] == [2, 1, 1]
    assert found[3]["without_gradient/unused.weight"] == 1


def test_gradients_between_checks_count(tmp_path: Path) -> None:
    """A head that trains at step 4 only, which is not checked, is not one that never trains."""
    steps: list[int] = []

    def loss(model: Any, batch: Any) -> Tensor:
        steps.append(1)
        return mean_loss(model, batch) + (model.unused.weight.sum() if len(steps) == 4 else 0)

    found = run(tmp_path, loss=loss, data=batches(5))
    assert [found[step]["without_gradient_count"] for step in (3, 5)] == [2, 2]
    assert [found[step]["never_gradient_count"] for step in (3, 5)] == [2, 1]


def test_families_name_at_most_eight_parameters(tmp_path: Path) -> None:
    model = Net()
    model.unused = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))
    metrics = run(tmp_path, model=model)[1]
    assert metrics["without_gradient_count"] == 20
    assert sum(name.startswith("without_gradient/") for name in metrics) == 8


def test_gradients_that_nothing_zeroes_are_counted(tmp_path: Path) -> None:
    found = run(tmp_path, zeroes=False)
    assert [found[step]["leftover_gradient_count"] for step in (1, 2, 3)] == [0, 4, 4]


@pytest.mark.parametrize(("zeroes", "expected"), [(True, 1), (False, 0)])
def test_gradients_zeroed_between_micro_batches_are_lost(tmp_path: Path, zeroes: bool, expected: float) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        model.zero_grad() if zeroes else None
        return mean_loss(model, batch) / 2

    found = run(tmp_path, loss=loss, accumulate=2)
    assert {metrics["lost_gradient_fraction"] for metrics in found.values()} == {expected}


def test_dead_units_are_a_share_of_rows(tmp_path: Path) -> None:
    def kill(model: Any) -> None:
        with torch.no_grad():
            model.first.bias[:3] = -1e6

    metrics = run(tmp_path, prepare=kill)[1]
    assert metrics["dead_units/first.weight"] == metrics["dead_units_max"] == 3 / 12
    # the other layer has no gradient from the dead units' columns
    assert metrics["gradient_zero_fraction"] == pytest.approx((3 * 6 + 3 * CLASSES) / (12 * 6 + 12 * CLASSES))


LOSSES: dict[str, tuple[Callable[[nn.Module, Any], Tensor], Metrics]] = {
    "sum": (lambda model, batch: summed(model, batch), {"loss_is_summed": 1, "doubly_normalised": 0}),
    "sum by rows": (lambda model, batch: summed(model, batch) / ROWS, {"loss_is_summed": 0}),
    "double": (
        lambda model, batch: F.cross_entropy(model(batch[0]).softmax(-1), batch[1]),
        {"doubly_normalised": 1, "loss_is_summed": 0},
    ),
    "likelihood": (lambda model, batch: F.nll_loss(model(batch[0]), batch[1]), {"lacks_log_softmax": 1}),
    "mse": (lambda model, batch: model(batch[0]).square().mean(), {"class_count": 0, "loss_is_summed": 0}),
}


def summed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


@pytest.mark.parametrize("name", LOSSES)
def test_facts_of_losses_are_reported(tmp_path: Path, name: str) -> None:
    loss, expected = LOSSES[name]
    metrics = run(tmp_path, loss=loss)[1]
    assert {name: metrics[name] for name in expected} == expected


@pytest.mark.parametrize("divisor", [1, 4])
def test_accumulation_with_and_without_division(tmp_path: Path, divisor: int) -> None:
    metrics = run(tmp_path, loss=lambda model, batch: mean_loss(model, batch) / divisor, accumulate=4)[2]
    assert (metrics["micro_batches"], metrics["loss_divisor"]) == (4, divisor)
    assert metrics["averages_micro_batches"] == (divisor == 4)


def test_data_statistics_join_micro_batches(tmp_path: Path) -> None:
    data = batches(6)
    found = run(tmp_path, data=data, accumulate=2)
    inputs, targets = (torch.cat([part[index] for part in data[:2]]) for index in (0, 1))
    assert found[1]["input_std"] == pytest.approx(float(inputs.std(correction=0)), rel=1e-5)
    assert found[1]["target_top_fraction"] == max(targets.bincount().tolist()) / len(targets)


def test_repeated_data_and_single_classes_are_reported(tmp_path: Path) -> None:
    first = batches(1)[0]
    same = (torch.zeros(ROWS, 6), torch.ones(ROWS, dtype=torch.int64))
    found = run(tmp_path, data=[first, first, same])
    assert [found[step]["repeated_row_fraction"] for step in (1, 2, 3)] == [0, 1, 0]
    assert found[3]["duplicate_row_fraction"] == 1 - 1 / ROWS
    assert found[3]["single_class_batch_fraction"] == 1 / 3
    assert (found[3]["target_top"], found[3]["target_top_fraction"]) == (1, 1)


@pytest.mark.parametrize("rows", [(6,), (1, 6)])
@pytest.mark.parametrize("passes", [1, 6])
def test_episodes_may_start_with_equal_observations(tmp_path: Path, rows: tuple[int, ...], passes: int) -> None:
    """Of several passes in a step the checks know the first; the same single pass at every step is a mistake."""
    model = nn.Sequential(nn.Linear(6, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with loopscope.attach(model, optimizer, hooks=[TrainingChecks()], out=tmp_path, display="none", sinks=["jsonl"]):
        for _ in range(3):
            observations = [torch.zeros(rows), *(torch.randn(rows) for _ in range(passes - 1))]
            torch.stack([model(item).log_softmax(-1).max() for item in observations]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name in ("same_batch_count", "duplicate_row_fraction"):
        assert (name in read(tmp_path)[3]) is (passes == 1)


def test_modules_in_eval_mode_are_counted(tmp_path: Path) -> None:
    metrics = run(tmp_path, prepare=lambda model: model.dropout.eval())[1]
    assert (metrics["eval_mode_count"], metrics["model_in_eval"]) == (1, 0)


@pytest.mark.filterwarnings("ignore:The model")
def test_model_in_eval_mode_is_reported(tmp_path: Path) -> None:
    metrics = run(tmp_path, prepare=lambda model: model.eval())[1]
    assert (metrics["eval_mode_count"], metrics["model_in_eval"]) == (0, 1)


def test_update_ratio_and_clipping_match_sgd(tmp_path: Path) -> None:
    """Of SGD the update is the learning rate times the clipped gradient."""
    model = Net()
    norm = math.hypot(*(float(parameter.detach().norm()) for parameter in model.parameters()))
    metrics = run(tmp_path, model=model, clip=0.01, lr=0.1)[1]
    assert metrics["clip_factor"] * metrics["grad_norm"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["update_ratio"] == pytest.approx(0.1 * 0.01 / norm, rel=1e-3)


class Weights(at(SpyHook, HookPoint.PRE_UPDATE, HookPoint.POST_STEP)):
    """Keeps the weights around each update, in float64."""

    name = "weights"

    def __init__(self) -> None:
        self.copies: dict[HookPoint, list[Tensor]] = {HookPoint.PRE_UPDATE: [], HookPoint.POST_STEP: []}

    def compute(self, ctx: RunDataContext) -> dict[str, float]:
        flat = torch.cat([value.detach().double().flatten() for value in ctx.model.parameters()])
        self.copies[ctx.hook_point].append(flat)
        return {}

    def ratios(self) -> list[float]:
        return [float((new - old).norm() / old.norm()) for old, new in zip(*self.copies.values(), strict=True)]


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_update_ratio_matches_weight_copies(optimizer: str) -> None:
    weights = Weights()
    found = train(Case("transformer", optimizer), [weights, TrainingChecks(interval=1)], steps=6)
    ratios = [row[3] for row in found.sink.rows() if row[0] == "training_checks/update_ratio"]
    assert ratios == pytest.approx(weights.ratios(), rel=1e-5)


@pytest.mark.longer
def test_committed_changes_are_not_updates() -> None:
    """Weights that another hook commits do not enter the update ratio."""

    def blend(ctx, model_ctx):
        model_ctx.blend_parameters({name: torch.ones_like(p) for name, p in ctx.model.named_parameters()}, 0.5)

    points = (HookPoint.POST_BACKWARD, HookPoint.POST_STEP)
    acting = at(ActingHook, *points, mutates=False, commits={StatePart.PARAMETERS}, needs_pre_epoch_state=False)
    weights = Weights()
    found = train(Case(), [TrainingChecks(interval=1), acting(blend), weights], steps=3)
    ratios = [row[3] for row in found.sink.rows() if row[0] == "training_checks/update_ratio"]
    assert ratios == pytest.approx(weights.ratios(), rel=1e-5)


def test_parameters_that_the_step_leaves_are_named(tmp_path: Path) -> None:
    found = run(tmp_path, lr=0.0)
    assert [found[step]["unchanged_count"] for step in (1, 3)] == [4, 4]
    assert found[3]["unchanged/first.weight"] == 3
    assert found[3]["update_ratio"] == 0
    assert found[3]["lr"] == 0


def test_gradients_without_a_loss_are_measured(tmp_path: Path) -> None:
    """A loop whose gradients come neither from a backward pass nor from a loss has no facts about the loss."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loopscope.attach(
        model, optimizer, hooks=["training_checks"], out=tmp_path / "run", display="none", sinks=["jsonl"]
    ) as scope:
        for batch in scope.batches(batches(2)):
            parameters = [*model.parameters()]
            gradients = torch.autograd.grad(mean_loss(model, batch), parameters, allow_unused=True, create_graph=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if gradient is None else gradient.detach()
            scope.gradients_ready()
            optimizer.step()
    metrics = read(tmp_path / "run")[2]
    assert metrics["without_gradient_count"] == 2
    assert metrics["clip_factor"] == 1
    assert metrics.keys().isdisjoint({"loss", "grad_norm", "micro_batches", "leftover_gradient_count"})


def test_sparse_gradients_are_measured(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, CLASSES))
    data = [(torch.tensor([[0, 1], [2, 1]]), torch.tensor([0, 1]))] * 3
    metrics = run(tmp_path, model=model, data=data)[2]
    assert (metrics["zero_gradient_count"], metrics["without_gradient_count"]) == (0, 0)
    assert metrics["update_ratio"] > 0
    assert "input_mean" not in metrics


def test_first_checks_are_delivered_at_once() -> None:
    """Those of later steps wait for the end of the logging interval."""
    found = train(Case("batchnorm_mlp"), [TrainingChecks()], steps=6, log_every=6, compute_loss=mean_loss)
    steps = [step for _, _, point, step in found.sink.emitted if point is HookPoint.POST_BACKWARD]
    assert [step for step in steps if step < 6] == [1, 2, 3]


def test_skipped_steps_have_no_update(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=100)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loopscope.attach(
        model,
        optimizer,
        hooks=["training_checks"],
        out=tmp_path / "run",
        scaler=scaler,
        display="none",
        sinks=["jsonl"],
    ) as scope:
        for batch in scope.batches(batches(3)):
            scope.backward(1e5 * mean_loss(model, batch) ** 8)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = read(tmp_path / "run")
    assert "update_ratio" not in found[1]
    assert found[1]["loss_scale"] == 2.0**120


@pytest.mark.parametrize(("thawed", "expected"), [(set(), 2), ({8}, 0)], ids=["to the end", "with a pause"])
def test_layers_frozen_in_training_are_counted(tmp_path: Path, thawed: set[int], expected: int) -> None:
    """Two parameters are frozen from step 5 on; those that a later step trains are forgotten."""
    steps: list[int] = []

    def loss(model: Any, batch: Any) -> Tensor:
        steps.append(1)
        for parameter in model.first.parameters():
            parameter.requires_grad_(len(steps) < 5 or len(steps) in thawed)
        return mean_loss(model, batch)

    found = run(tmp_path, loss=loss, data=batches(20))
    counts = [found[step].get("frozen_later_count") for step in sorted(CHECKED)]
    assert counts == [None, None, None, 2, expected, expected]
    assert found[20].get("frozen_later/first.weight") == (3 if expected else None)
