import io
import math

import pytest
import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, TrainingHook
from loopscope.loops import step_loop
from loopscope.state import RandomStreams, TrainingState, seed_everything
from loopscope.tensors import cosine, dot, minus, norm
from loopscope.training import TrainingTask
from loopscope.training_hooks.curvature import Hessian
from torch import Tensor, nn
from torch.nn import functional

from tests.support import Case, RecordingSink, assert_same_bytes, mean_loss, run_info, train

ALWAYS = {"every_n_steps": 100, "burst_length": 100}
Rows = dict[int, dict[str, float]]


class Point(nn.Module):
    """A model whose parameter is a point in the plane, for quadratic losses."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))


def quadratic(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return ½ θᵀAθ − bᵀθ, A and b the means over the batch."""
    matrix, linear = batch[0].mean(dim=0), batch[1].mean(dim=0)
    return model.place @ matrix @ model.place / 2 - linear @ model.place


def bowls() -> tuple[Tensor, Tensor]:
    """Draw a symmetric matrix and a vector for each of eight rows."""
    generator = torch.Generator().manual_seed(2)
    roots = torch.randn(8, 3, 3, generator=generator, dtype=torch.float64)
    return roots @ roots.transpose(1, 2), torch.randn(8, 3, generator=generator, dtype=torch.float64)


class Path(TrainingHook):
    """Records the parameters before every step, and after the last."""

    name = "path"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_STEP})

    def __init__(self) -> None:
        self.places: dict[int, dict[str, Tensor]] = {}

    def compute(self, ctx):
        step = ctx.step + (ctx.hook_point is HookPoint.POST_STEP)
        self.places[step] = {name: value.detach().clone() for name, value in ctx.model.named_parameters()}
        return {}

    def describe_metrics(self):
        return []


def measured(task: TrainingTask, hook: Hessian, reference: dict[str, Tensor] | None = None) -> tuple[Rows, Path]:
    """Run the step loop; return the metrics by step, and the path of the parameters."""
    path, sink = Path(), RecordingSink()
    state = TrainingState(task.model, task.optimizer, RandomStreams(7))
    manager = HookManager([path, hook], task, state, loop="step", sinks=[sink], reference_weights=reference)
    run_steps(task, manager)
    return rows_of(sink), path


def rows_of(sink: RecordingSink) -> Rows:
    found: Rows = {}
    for name, _, step, value in sink.rows("hessian"):
        found.setdefault(step, {})[name.removeprefix("hessian/")] = value
    return found


def quadratic_task(optimizer: str, **options: float) -> TrainingTask:
    model = Point()
    chosen = getattr(torch.optim, optimizer)(model.parameters(), **options)
    loader = TensorLoader(bowls(), 2, fixed_order(torch.arange(8)))
    return TrainingTask(model, chosen, loader, quadratic, length=4)


@pytest.mark.parametrize("method", ["exact", "finite_difference"])
@pytest.mark.parametrize(("optimizer", "lr"), [("SGD", 0.02), ("AdamW", 0.05)])
def test_metrics_match_closed_form_on_quadratic_losses(method, optimizer, lr):
    """The method is exact or finite differences, and the optimizer is SGD or AdamW."""
    goal = torch.tensor([3.0, 1.0, -1.0], dtype=torch.float64)
    rows, path = measured(quadratic_task(optimizer, lr=lr), Hessian(method=method, **ALWAYS), {"place": goal})
    matrices, linears = (part.view(4, 2, *part.shape[1:]).mean(dim=1) for part in bowls())
    changes: list[Tensor] = []
    for step in (2, 3, 4):
        start, now = path.places[step - 1]["place"], path.places[step]["place"]
        a, b, update = matrices[step - 1], linears[step - 1], now - start
        previous, gradient = matrices[step - 2] @ start - linears[step - 2], a @ start - b
        change, sgd = a @ update, -lr * (a @ previous)
        expected = {
            "entanglement_norm": change.norm(),
            "entanglement_ratio": change.norm() / gradient.norm(),
            "entanglement_cosine": functional.cosine_similarity(change, gradient, dim=0),
            "gradient_cosine": functional.cosine_similarity(previous, gradient, dim=0),
            "exact_products": torch.tensor(float(method == "exact")),
            "first_order_norm": change.norm(),
            "first_order_error": torch.tensor(0.0),
            "first_order_cosine": torch.tensor(1.0),
            "sgd_norm": sgd.norm(),
            "sgd_error": (sgd - change).norm() / change.norm(),
            "sgd_cosine": functional.cosine_similarity(sgd, change, dim=0),
            "update_curvature": (update @ a @ update) / (update @ update),
            "gradient_curvature": (previous @ a @ previous) / (previous @ previous),
            "update_solution_cosine": functional.cosine_similarity(update, goal - start, dim=0),
            "entanglement_solution_cosine": functional.cosine_similarity(-change, goal - start, dim=0),
            "gradient_solution_cosine": functional.cosine_similarity(-gradient, goal - start, dim=0),
        }
        gradients = [matrices[i] @ path.places[i + 1]["place"] - linears[i] for i in range(step - 1)]
        expected |= against_threshold(optimizer, lr, gradients, update, change)
        expected |= own_step(a, b, now, path.places[step + 1]["place"])
        if changes:
            expected["coherence"] = functional.cosine_similarity(change, changes[-1], dim=0)
            every = torch.stack([*changes, change])
            expected["burst_coherence"] = every.sum(dim=0).norm() / every.norm(dim=1).sum()
        changes.append(change)
        described = {info.name for info in Hessian().describe_metrics()}
        assert expected.keys() == rows[step].keys() <= described
        assert described - expected.keys() <= {"preconditioned_curvature", "coherence", "burst_coherence"}
        assert rows[step] == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-7, abs=1e-9)
        assert (rows[step]["sgd_error"] < 1e-7) == (optimizer == "SGD")


def against_threshold(
    optimizer: str, lr: float, gradients: list[Tensor], update: Tensor, product: Tensor
) -> dict[str, Tensor]:
    """Return the curvature along an update divided by the optimizer's threshold after these gradients."""
    if optimizer == "SGD":
        return {"stability_ratio": (update @ product) / (update @ update) / (2 / lr)}
    moment = sum(0.001 * 0.999**age * each.square() for age, each in enumerate(reversed(gradients)))
    preconditioner = (moment / (1 - 0.999 ** len(gradients))).sqrt() + 1e-8
    curvature = (update @ product) / (update @ (preconditioner * update))
    threshold = (1 - 0.9 ** len(gradients)) * 38 / lr
    return {"preconditioned_curvature": curvature, "stability_ratio": curvature / threshold}


def own_step(a: Tensor, b: Tensor, now: Tensor, after: Tensor) -> dict[str, Tensor]:
    """Return the metrics of a step from ``now`` to ``after`` on its own quadratic loss."""
    update, gradient = after - now, a @ now - b
    change, predicted = a @ update, gradient @ update
    actual = predicted + update @ change / 2
    return {
        "own_loss_change": actual,
        "own_loss_change_predicted": predicted,
        "own_gain_ratio": actual / predicted,
        "own_entanglement_ratio": change.norm() / gradient.norm(),
        "own_entanglement_cosine": functional.cosine_similarity(change, gradient, dim=0),
        "own_curvature": update @ change / (update @ update),
    }


def network_task(lr: float, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, length: int = 4) -> TrainingTask:
    """Make a small float64 classifier whose layers have different learning rates."""
    seed_everything(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    groups = [{"params": model[0].parameters(), "lr": lr / 3}, {"params": model[2].parameters(), "lr": lr}]
    data = (torch.randn(15, 4, dtype=torch.float64), torch.randint(3, (15,)))
    loader = TensorLoader(data, 4, fixed_order(torch.arange(15)))
    return TrainingTask(model, optimizer(groups), loader, mean_loss, length=length)


def gradient_at(task: TrainingTask, place: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    values = {name: value.clone().requires_grad_() for name, value in place.items()}
    loss = functional.cross_entropy(torch.func.functional_call(task.model, values, (batch[0],)), batch[1])
    return dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_network_entanglement_is_a_gradient_difference(optimizer):
    """It is the change of one batch's gradient over the previous step, for SGD and AdamW."""
    task = network_task(0.2, optimizer)
    batches = list(task.loader.batches(0))
    rows, path = measured(task, Hessian(**ALWAYS))
    for step in (2, 3, 4):
        ends = [gradient_at(task, path.places[at], batches[step - 1]) for at in (step - 1, step)]
        change = minus(ends[1], ends[0])
        assert rows[step]["entanglement_norm"] == pytest.approx(norm(change).item(), rel=1e-9)
        assert rows[step]["entanglement_cosine"] == pytest.approx(cosine(change, ends[0]).item(), rel=1e-9)
        own = [gradient_at(task, path.places[at], batches[step - 1]) for at in (step, step + 1)]
        update = minus(path.places[step + 1], path.places[step])
        assert rows[step]["own_loss_change_predicted"] == pytest.approx(dot(own[0], update).item(), rel=1e-9)


@pytest.mark.longer
def test_sgd_approximations_agree_and_improve():
    """Under SGD, their error is proportional to the learning rate."""
    errors = []
    for lr in (0.04, 0.02, 0.01):
        row = measured(network_task(lr), Hessian(**ALWAYS))[0][2]
        assert row["sgd_error"] == pytest.approx(row["first_order_error"], rel=1e-6)
        errors.append(row["first_order_error"])
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.05)


def test_sgd_formula_fails_under_adam():
    """The SGD formula misses 80 percent, while the first-order error is below 5 percent."""
    row = measured(network_task(1e-3, torch.optim.AdamW), Hessian(**ALWAYS))[0][3]
    assert row["first_order_error"] < 0.05
    assert row["sgd_error"] > 0.8


@pytest.mark.longer
def test_finite_differences_match_exact_products():
    exact = measured(network_task(0.2), Hessian(**ALWAYS))[0]
    differences = measured(network_task(0.2), Hessian(method="finite_difference", epsilon=1e-4, **ALWAYS))[0]
    for step, row in exact.items():
        methods = row.pop("exact_products", True), differences[step].pop("exact_products", False)
        assert methods == (True, False)
        assert differences[step] == pytest.approx(row, rel=1e-5)


@pytest.mark.longer
def test_zero_length_step_has_no_entanglement():
    """Dropout and batch norm do not add any."""

    def rows(lr: float) -> Rows:
        task = network_task(lr)
        task.model.insert(2, nn.Dropout(0.5))
        task.model.insert(2, nn.BatchNorm1d(6).double())
        return measured(task, Hessian(**ALWAYS))[0]

    still = rows(0.0)
    assert [still[step]["entanglement_norm"] for step in (2, 3, 4)] == [0.0] * 3
    assert [still[step]["own_loss_change"] for step in (1, 2, 3, 4)] == [0.0] * 4
    assert math.isnan(still[2]["first_order_cosine"])
    assert rows(0.1)[2]["entanglement_norm"] > 0


def round_bowl(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return 3‖θ − c‖²/2, c the mean over the batch."""
    return 1.5 * (model.place - batch[1].mean(dim=0)).square().sum()


def test_parallel_entanglements_are_coherent():
    task = quadratic_task("SGD", lr=0.01)
    still = TensorLoader((bowls()[0], torch.ones(8, 3, dtype=torch.float64)), 2, fixed_order(torch.arange(8)))
    task.loader, task.compute_loss = still, round_bowl
    rows, _ = measured(task, Hessian(**ALWAYS))
    assert "coherence" not in rows[2]
    for step in (3, 4):
        assert rows[step]["coherence"] == pytest.approx(1)
        assert rows[step]["burst_coherence"] == pytest.approx(1)


def test_coherence_restarts_with_every_burst():
    task = quadratic_task("SGD", lr=0.01)
    task.length = 9
    rows, _ = measured(task, Hessian(every_n_steps=5, burst_length=3))
    assert {step for step, row in rows.items() if "burst_coherence" in row} == {3, 8}
    assert {step for step, row in rows.items() if "entanglement_norm" in row} == {2, 3, 7, 8}


def test_threshold_uses_learning_rate_of_its_step():
    """The scheduler has already changed the learning rate when the hook measures."""
    task = quadratic_task("SGD", lr=0.02)
    task.scheduler = torch.optim.lr_scheduler.ExponentialLR(task.optimizer, 0.5)
    rows, _ = measured(task, Hessian(**ALWAYS))
    for step in (2, 3, 4):
        expected = rows[step]["update_curvature"] * 0.02 * 0.5 ** (step - 2) / 2
        assert rows[step]["stability_ratio"] == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop"])
def test_unknown_metrics_are_omitted(optimizer):
    row = measured(quadratic_task(optimizer, lr=0.01), Hessian(**ALWAYS))[0][3]
    assert not [name for name in row if "solution" in name]
    assert ("preconditioned_curvature" in row) == (optimizer == "Adam")
    assert ("stability_ratio" in row) == (optimizer != "RMSprop")


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_bursts_report_entanglement_from_second_step(loop):
    case = Case("transformer", "adamw_fused", loop)
    run = train(case, [Hessian(every_n_steps=5, burst_length=3, warmup=2)], steps=12)
    found = {(point, step) for name, point, step, _ in run.sink.rows("hessian")}
    assert {step for point, step in found if point is HookPoint.PRE_STEP} == {4, 5, 9, 10}
    assert {step for point, step in found if point is HookPoint.POST_STEP} == {3, 4, 5, 8, 9, 10}
    assert_same_bytes(run, case, 12)


@pytest.mark.longer
def test_adjacent_bursts_are_one_burst():
    run = train(Case("tied"), [Hessian(every_n_steps=2, burst_length=2)], steps=6)
    assert [row[2] for row in run.sink.rows("hessian/entanglement_norm")] == [2, 3, 4, 5, 6]


def test_parameter_copy_lasts_only_for_the_burst():
    """A reset also discards the copy."""
    hook, held = Hessian(every_n_steps=4, burst_length=2), []

    class Watch(Path):
        name = "watch"
        hook_points = frozenset({HookPoint.PRE_STEP})

        def compute(self, ctx):
            held.append(sorted(hook.state_dict()))
            return {}

    train(Case("tied"), [Watch(), hook], steps=6)
    kept = ["parameters", "rates", "step", "threshold", "trail"]
    assert held == [[], kept, *[["method"]] * 3, sorted(["method", *kept])]
    hook.load_state_dict({"step": 1, "parameters": {}, "rates": {}})
    hook.reset()
    assert hook.state_dict() == {}


def run_steps(task: TrainingTask, manager: HookManager) -> None:
    manager.start(run_info(task, manager, "step"))
    step_loop(task, manager)


def resumed(*, with_state: bool) -> Rows:
    """Run two steps, then two more with a new hook, optionally with the state of the first hook."""
    task, sink, first, second = network_task(0.2, length=2), RecordingSink(), Hessian(**ALWAYS), Hessian(**ALWAYS)
    state = TrainingState(task.model, task.optimizer, RandomStreams(7))
    run_steps(task, HookManager([first], task, state, loop="step"))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True) if with_state else {})
    task.length = 4
    run_steps(task, HookManager([second], task, state, loop="step", sinks=[sink]))
    return rows_of(sink)


@pytest.mark.longer
def test_resumed_burst_matches_uninterrupted_burst():
    """Without the saved state, the burst starts again and lacks its first metrics."""
    whole = measured(network_task(0.2), Hessian(**ALWAYS))[0]
    assert resumed(with_state=True) == {step: whole[step] for step in (3, 4)}
    fresh = resumed(with_state=False)
    assert "entanglement_norm" not in fresh[3]
    assert fresh[4] == {name: value for name, value in whole[4].items() if "coherence" not in name}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epsilon": 0.0}, "hessian.epsilon is 0.0; it must be a positive number"),
        ({"epsilon": math.nan}, "hessian.epsilon is nan"),
        ({"method": "exakt"}, "Unknown hessian.method 'exakt'. Did you mean 'exact'"),
        ({"burst_length": 1}, "hessian.burst_length is 1; entanglement needs at least 2"),
        ({"burst_length": 9, "every_n_steps": 5}, "burst_length is 9; it must be in"),
        ({"warmup": -1}, "warmup is -1"),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    with pytest.raises(UsageError) as caught:
        Hessian(**options)
    assert sentence in str(caught.value)
