import math

import numpy as np
import pytest
import scipy.linalg
import torch
from loopscope.data import TensorLoader, fixed_order, random_order
from loopscope.engine import CommitRecord, HookManager
from loopscope.engine.model_context import Access, ModelContext
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import ModelDataContext
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.tensors import trainable
from loopscope.training import TrainingTask
from loopscope.training_hooks.curvature import Sharpness
from loopscope.training_hooks.measures import drawn_loader
from torch import Tensor, nn
from torch.nn import functional

from tests.framework.training.test_curvature import KINDS, data, dense_hessian, mean_loss
from tests.support import Case, RecordingSink, assert_same_bytes, run_info, train
from tests.support.processes import own_process

ROWS, BATCH, STEPS = 7, 4, 2
WHOLE = {"batches": 9, "density_probes": 0, "iterations": 200, "k": 4, "critical_passes": 0}
Values = dict[str, float | list[float]]


def task_of(name: str, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options) -> TrainingTask:
    """Make one epoch of two uneven batches on a model of KINDS, in float64."""
    torch.manual_seed(4)
    kind = KINDS[name]
    model, rows = kind.make().double(), data(kind, torch.float64)
    chosen = optimizer(model.parameters(), **({"lr": 0.05} | options))
    loader = TensorLoader(rows, BATCH, fixed_order(torch.arange(ROWS)))
    return TrainingTask(model, chosen, loader, mean_loss, accumulation_steps=kind.accumulation_steps)


def measured(task: TrainingTask, hook: Sharpness) -> tuple[Values, ModelDataContext]:
    """Train with the hook; return its metrics, and a model context with its random stream at the end."""
    state, sink = TrainingState(task.model, task.optimizer, RandomStreams(7)), RecordingSink()
    manager = HookManager([hook], task, state, sinks=[sink], audit=True)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    (row,) = sink.emitted
    state.streams.derive("sharpness", "SNAPSHOT", state.loop.step)
    record, parameters = CommitRecord("probe", frozenset()), list(task.model.parameters())
    stream = ("sharpness", "SNAPSHOT", state.loop.step)
    access = Access(task, state, record, parameters, mutates=True, device=None, stream=stream, loop="epoch")
    return {name.removeprefix("sharpness/"): value for name, value in row[0].items()}, ModelContext(access)


def measured_batches(ctx: ModelDataContext) -> list[tuple[Tensor, Tensor]]:
    return list(drawn_loader("sharpness", ctx.loader).batches(0))


def hessian(ctx: ModelDataContext) -> Tensor:
    """Return the dense Hessian of the mean loss over all rows, the weighted sum over batches."""
    total = 0.0
    for batch in measured_batches(ctx):
        ctx._state.loop.batch = batch
        total = total + dense_hessian(ctx) * len(batch[0]) / ROWS
    return total


def gradient(ctx: ModelDataContext) -> dict[str, Tensor]:
    """Return the gradient of the mean loss over all rows."""
    parts = [(len(batch[0]) / ROWS, ctx.compute_batch_gradients(batch)) for batch in measured_batches(ctx)]
    return {name: sum(share * vector[name] for share, vector in parts) for name in parts[0][1]}


def flat(vector: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in vector.values()])


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("name", KINDS)
def test_eigenvalues_match_dense_hessian(name):
    values, ctx = measured(task_of(name), Sharpness(**WHOLE))
    expected = scipy.linalg.eigvalsh(hessian(ctx).numpy())
    np.testing.assert_allclose(values["eigenvalues"], expected[::-1][:4], rtol=1e-7, atol=1e-9)
    assert values["sharpness"] == values["eigenvalues"][0]
    assert values["smallest_eigenvalue"] == pytest.approx(expected[0], rel=1e-7, abs=1e-9)
    assert max(*values["residuals"], values["smallest_residual"]) < 1e-7
    assert values["stability_ratio"] == pytest.approx(expected[-1] * 0.05 / 2, rel=1e-7)


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("name", KINDS)
def test_smallest_eigenvalue_has_an_error(name):
    """After four iterations the dense Hessian has an eigenvalue within the reported residual."""
    values, ctx = measured(task_of(name), Sharpness(**WHOLE | {"iterations": 4}))
    expected = scipy.linalg.eigvalsh(hessian(ctx).numpy())
    distance = np.abs(expected - values["smallest_eigenvalue"]).min()
    assert distance <= values["smallest_residual"] * (1 + 1e-6) + 1e-9
    assert values["smallest_eigenvalue"] >= expected[0] - 1e-9


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("name", KINDS)
def test_trace_matches_dense_hessian(name):
    """The estimate is within four of its standard errors."""
    values, ctx = measured(task_of(name), Sharpness(batches=9, iterations=5, probes=60, critical_passes=0))
    assert 0 < values["trace_error"] < hessian(ctx).norm()
    assert abs(values["trace"] - hessian(ctx).trace()) < 4 * values["trace_error"]


@pytest.mark.slow
def test_density_matches_dense_hessian():
    """The spectral moments and the smoothed density agree with the exact spectrum."""
    options = {"batches": 9, "iterations": 12, "probes": 60, "density_probes": 60, "density_points": 40}
    values, ctx = measured(task_of("mlp"), Sharpness(**options, critical_passes=0))
    matrix = hessian(ctx)
    expected, square = torch.linalg.eigvalsh(matrix), matrix.square().sum()
    assert values["eigenvalue_rms"] == pytest.approx((square / len(matrix)).sqrt().item(), rel=0.1)
    assert values["effective_directions"] == pytest.approx((expected.abs().sum() ** 2 / square).item(), rel=0.1)
    negative = expected.clamp(max=0).square().sum() / square
    assert values["negative_energy"] == pytest.approx(negative.item(), abs=0.02)
    grid, density = torch.tensor(values["density_grid"]), torch.tensor(values["density"])
    spacing = grid[1] - grid[0]
    kernel = torch.exp(-(((grid[:, None] - expected) / spacing) ** 2) / 2) / (spacing * math.sqrt(2 * math.pi))
    assert (density - kernel.mean(dim=1)).abs().max() < 0.1 * kernel.mean(dim=1).max()


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("name", ["mlp", "tied weights", "dropout", "frozen and unused parameters"])
def test_preconditioned_eigenvalues_match_dense_hessian(name, optimizer):
    """The dense Hessian is preconditioned with the second moments of Adam or AdamW."""
    values, ctx = measured(task_of(name, optimizer, betas=(0.9, 0.99), eps=1e-3), Sharpness(**WHOLE))
    states = ctx._task.optimizer.state
    scales = {  # unused parameters have no state, and no curvature
        name: (states[value]["exp_avg_sq"] / (1 - 0.99**STEPS)).sqrt() + 1e-3 if value in states else value * 0 + 1.0
        for name, value in trainable(ctx.model).items()
    }
    root = flat(scales).rsqrt()
    expected = scipy.linalg.eigvalsh((root[:, None] * hessian(ctx) * root).numpy())
    np.testing.assert_allclose(values["preconditioned_eigenvalues"], expected[::-1][:4], rtol=1e-7, atol=1e-8)
    assert values["preconditioned_smallest_eigenvalue"] == pytest.approx(expected[0], rel=1e-7, abs=1e-8)
    assert max(values["preconditioned_residuals"]) < 1e-6
    assert values["stability_ratio"] == pytest.approx(expected[-1] * 0.05 / 38 / (1 - 0.9**STEPS), rel=1e-7)
    assert values["sharpness"] == pytest.approx(scipy.linalg.eigvalsh(hessian(ctx).numpy())[-1], rel=1e-7)


def regression_task(loss, targets: Tensor, outputs: int, optimizer=torch.optim.SGD, **options) -> TrainingTask:
    """Make one epoch of a linear model without bias on seven rows of three features."""
    torch.manual_seed(1)
    model = nn.Linear(3, outputs, bias=False).double()
    chosen = optimizer(model.parameters(), **({"lr": 0.02} | options))
    loader = TensorLoader((torch.randn(ROWS, 3, dtype=torch.float64), targets), BATCH, fixed_order(torch.arange(ROWS)))
    return TrainingTask(model, chosen, loader, lambda model, batch: loss(model(batch[0]), batch[1]))


def linear_task(optimizer=torch.optim.SGD, **options) -> TrainingTask:
    targets = torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return regression_task(functional.mse_loss, targets, 1, optimizer, **options)


def features(ctx: ModelDataContext) -> Tensor:
    return ctx.loader._tensors[0]


def test_linear_regression_curvature_matches_gram_matrix():
    values, ctx = measured(linear_task(), Sharpness(**(WHOLE | {"k": 3, "density_probes": 2})))
    x = features(ctx)
    expected = torch.linalg.eigvalsh(2 * x.T @ x / ROWS)
    assert values["eigenvalues"] == pytest.approx(expected.flip(0).tolist(), rel=1e-10)
    assert values["negative_energy"] == 0


def test_softmax_regression_curvature_matches_closed_form():
    task = regression_task(functional.cross_entropy, torch.tensor([0, 1, 2, 3, 0, 1, 2]), 4)
    values, ctx = measured(task, Sharpness(**WHOLE))
    x = features(ctx)
    p = ctx.model(x).detach().softmax(dim=1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.einsum("nij,nk,nl->ikjl", inner, x, x).reshape(12, 12) / ROWS
    np.testing.assert_allclose(values["eigenvalues"], torch.linalg.eigvalsh(expected).flip(0)[:4], rtol=1e-9)
    assert values["smallest_eigenvalue"] == pytest.approx(0, abs=1e-9)


CRITICAL = {"batches": 9, "iterations": 0, "critical_passes": 40}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_critical_sharpness_matches_curvature_along_gradient(momentum):
    """The loss is quadratic, and momentum makes no difference."""
    values, ctx = measured(linear_task(momentum=momentum), Sharpness(**CRITICAL))
    x, g = features(ctx), flat(gradient(ctx))
    expected = (g @ (2 * x.T @ x / ROWS) @ g) / (g @ g)
    assert values["critical_sharpness"] == pytest.approx(expected.item(), rel=1e-6)
    assert values.keys() == {
        "critical_sharpness",
        "update_critical_ratio",
        "update_critical_lr",
        "update_critical_sharpness",
    }


@pytest.mark.longer
def test_preconditioned_critical_sharpness_is_rayleigh_quotient():
    """The loss is quadratic; the quotient uses the preconditioned Hessian and is at most its largest eigenvalue."""
    values, ctx = measured(linear_task(torch.optim.Adam, betas=(0.9, 0.99), eps=1e-3), Sharpness(**CRITICAL))
    state = ctx._task.optimizer.state[ctx.model.weight]
    p = ((state["exp_avg_sq"] / (1 - 0.99**STEPS)).sqrt() + 1e-3).reshape(-1)
    x, g = features(ctx), flat(gradient(ctx))
    h = p.rsqrt()[:, None] * (2 * x.T @ x / ROWS) * p.rsqrt()
    v = p.rsqrt() * g
    expected = (v @ h @ v) / (v @ v)
    assert values["preconditioned_critical_sharpness"] == pytest.approx(expected.item(), rel=1e-6)
    assert expected <= torch.linalg.eigvalsh(h)[-1]


def next_update(ctx: ModelDataContext) -> Tensor:
    """Take the optimizer's next step on the first batch manually, and return the change of the parameters."""
    start = flat(trainable(ctx.model))
    ctx._task.optimizer.zero_grad()
    ctx._task.compute_loss(ctx.model, measured_batches(ctx)[0]).backward()
    ctx._task.optimizer.step()
    return flat(trainable(ctx.model)) - start


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.5, "weight_decay": 0.1}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_update_critical_lr_is_root_of_loss(optimizer, options):
    """At this learning rate, the optimizer's next step returns the loss of the batch to its current value."""
    values, ctx = measured(linear_task(optimizer, **options), Sharpness(**CRITICAL))
    batch = measured_batches(ctx)[0]
    g, hessian = flat(ctx.compute_batch_gradients(batch)), 2 * batch[0].T @ batch[0] / BATCH
    step = next_update(ctx)
    multiple = -2 * (g @ step) / (step @ hessian @ step)
    assert multiple > 0
    assert values["update_critical_ratio"] == pytest.approx(1 / multiple.item(), rel=1e-6)
    assert values["update_critical_lr"] == pytest.approx(0.02 * multiple.item(), rel=1e-6)
    assert values["update_critical_sharpness"] == pytest.approx(2 / (0.02 * multiple.item()), rel=1e-6)


def test_uphill_step_has_zero_critical_lr():
    """The next update increases the loss, so the critical ratio is infinite."""
    values, ctx = measured(linear_task(lr=1.5, momentum=0.99), Sharpness(**CRITICAL))
    batch = measured_batches(ctx)[0]
    g = flat(ctx.compute_batch_gradients(batch))
    assert g @ next_update(ctx) > 0
    assert values["update_critical_ratio"] == math.inf
    assert values["update_critical_lr"] == 0


@pytest.mark.longer
@pytest.mark.parametrize("name", ["dropout", "batch norm", "uneven micro-batches"])
def test_critical_step_restores_loss_with_same_dropout(name):
    """The loss is below its start at 0.99 of the step and above it at 1.01, with the dropout mask of the run."""
    values, ctx = measured(task_of(name), Sharpness(**CRITICAL))

    def loss() -> Tensor:
        return sum(ctx.compute_batch_loss(batch) * len(batch[0]) / ROWS for batch in measured_batches(ctx))

    before, direction = loss(), gradient(ctx)
    rate = 2 / values["critical_sharpness"]
    for factor, sign in ((0.99, -1), (1.01, 1)):
        with ctx.branch():
            ctx.apply_perturbation(direction, -factor * rate)
            assert (loss() - before).sign() == sign


@pytest.mark.longer
def test_finite_differences_match_exact_spectrum():
    exact, _ = measured(task_of("mlp"), Sharpness(**WHOLE))
    other, _ = measured(task_of("mlp"), Sharpness(**WHOLE, method="finite_difference", epsilon=1e-4))
    assert other["eigenvalues"] == pytest.approx(exact["eigenvalues"], rel=1e-4)
    assert other["trace"] == pytest.approx(exact["trace"], rel=1e-4)


def test_unknown_metrics_are_omitted():
    task = task_of("mlp")
    groups = [{"params": task.model[0].parameters(), "lr": 0.1}, {"params": task.model[2].parameters(), "lr": 0.2}]
    task.optimizer = torch.optim.SGD(groups)
    values, _ = measured(task, Sharpness(batches=1, iterations=3, critical_passes=2, density_probes=0))
    assert {"stability_ratio", "update_critical_lr", "density", "eigenvalue_rms"} & values.keys() == set()
    assert {"sharpness", "trace", "critical_sharpness", "update_critical_ratio"} <= values.keys()


ORDERS = {
    "as drawn": fixed_order(torch.arange(40)),
    "by label": fixed_order(torch.arange(40).remainder(3).argsort(stable=True)),
    "random": random_order(40, 3),
}


def still_task(order, batch_size: int = 4) -> TrainingTask:
    """Make a task of two epochs with a learning rate of zero."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    rows = (torch.randn(40, 3, dtype=torch.float64), torch.arange(40) % 3)
    return TrainingTask(
        model, torch.optim.Adam(model.parameters(), lr=0.0), TensorLoader(rows, batch_size, order), mean_loss
    )


@pytest.mark.longer
def test_single_batch_data_is_reported():
    """A notice reports that the measurement needs two batches."""
    with pytest.warns(RunNotice, match="The data are a single batch; the error of sharpness/sharpness needs"):
        measured(still_task(ORDERS["random"], 40), Sharpness(critical_passes=0))


@pytest.mark.slow
@pytest.mark.guarantee("hooks-are-independent")
def test_metrics_do_not_depend_on_order():
    """At equal weights, three orders of the same rows agree in all metrics that are not preconditioned."""
    found = [measured(still_task(order), Sharpness(critical_passes=0))[0] for order in ORDERS.values()]
    for values in found:
        own = {name: value for name, value in values.items() if not name.startswith("preconditioned")}
        assert own == {name: found[0][name] for name in own}
        assert values["rows"] == 16
    other = still_task(ORDERS["random"])
    other.loader = TensorLoader([part.flip(0) for part in other.loader._tensors], 4, ORDERS["random"])
    assert measured(other, Sharpness(critical_passes=0))[0]["sharpness"] != found[0]["sharpness"]


@pytest.mark.slow
def test_bias_and_spread_match_dense_hessians():
    """The eigenvalues of groups of 4, 8 and 16 rows are compared with that of all 36 rows."""
    values, ctx = measured(still_task(ORDERS["random"]), Sharpness(batches=9, iterations=30, critical_passes=0))
    each = []
    for batch in measured_batches(ctx)[:9]:
        ctx._state.loop.batch = batch
        each.append(dense_hessian(ctx))

    def largest(size: int) -> np.ndarray:
        groups = [sum(each[first : first + size]) / size for first in range(0, 9 - size + 1, size)]
        return np.array([scipy.linalg.eigvalsh(group.numpy())[-1] for group in groups])

    whole = largest(9)[0]
    assert values["rows"] == 36
    assert values["sharpness"] == pytest.approx(whole)
    for name, reduce in (("bias", lambda found: found.mean() - whole), ("spread", lambda found: found.std(ddof=1))):
        expected = {str(4 * size): reduce(largest(size)) for size in (1, 2, 4)}
        assert values[f"sharpness_{name}_by_rows"] == pytest.approx(expected)
    assert 0 < values["sharpness_bias_by_rows"]["8"] < values["sharpness_bias_by_rows"]["4"]


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize(
    ("option", "metrics"),
    [
        ("probes", {"trace_error"}),
        ("batches", {"sharpness_bias_by_rows", "sharpness_spread_by_rows"}),
        (
            "density_probes",
            {"eigenvalue_rms_error", "effective_directions_error", "negative_energy_error", "density_error"},
        ),
    ],
)
def test_too_few_samples_omit_errors_with_notice(option, metrics):
    """With a single probe or batch, the value is reported without its error."""
    few = {option: 1} | ({"density_probes": 1} if option == "probes" else {})
    with pytest.warns(RunNotice, match=rf"sharpness\.{option} is 1; the error of sharpness/\w+ needs at least 2"):
        values, _ = measured(still_task(ORDERS["random"]), Sharpness(critical_passes=0, **few))
    full, _ = measured(still_task(ORDERS["random"]), Sharpness(critical_passes=0))
    assert metrics <= full.keys() - values.keys()
    assert {"sharpness", "trace", "density", "eigenvalue_rms"} <= values.keys()


@pytest.mark.longer
def test_undrawable_loader_is_measured_in_order():
    """A notice reports that the first rows of the run's order are measured because the loader cannot draw rows."""

    class Undrawable(TensorLoader):
        def drawn(self, seed):
            raise UsageError("A stream has no rows to draw.")

    task = still_task(ORDERS["by label"])
    task.loader = Undrawable(task.loader._tensors, 4, ORDERS["by label"])
    with pytest.warns(RunNotice, match="'sharpness' measures the first rows in the run's order.*no rows to draw"):
        values, _ = measured(task, Sharpness(batches=2, critical_passes=0))
    assert values["rows"] == 8


@pytest.mark.slow_rows("transformer-adamw_fused-epoch")
@pytest.mark.parametrize("case", [Case("transformer", "adamw_fused"), Case("tied", "sgd_momentum", "step")], ids=str)
@own_process
def test_repeatedly_measured_run_matches_bare_run(case):
    """The hook measures at several snapshots, in the epoch loop and in the step loop."""
    run = train(case, [Sharpness()], steps=9)
    fires = {step for _, _, step, _ in run.sink.rows("sharpness")}
    assert fires == ({6, 9} if case.loop == "epoch" else {2, 4, 6, 8, 9})
    assert_same_bytes(run, case, 9)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batches": 0}, "sharpness.batches is 0; it must be at least 1"),
        ({"probes": 0}, "sharpness.probes is 0; it must be at least 1"),
        ({"k": 5, "iterations": 4}, "sharpness.iterations is 4; for k = 5 eigenvalues it must be at least 5"),
        ({"density_probes": 7, "probes": 6}, "sharpness.density_probes is 7; it must be at most sharpness.probes (6)"),
        ({"method": "exakt"}, "Unknown sharpness.method 'exakt'. Did you mean 'exact'"),
        ({"epsilon": math.inf}, "sharpness.epsilon is inf"),
        ({"iterations": 0, "critical_passes": 0}, "are both 0; set at least one of them"),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    with pytest.raises(UsageError) as caught:
        Sharpness(**options)
    assert sentence in str(caught.value)
