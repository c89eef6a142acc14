import io
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.engine import HookManager
from loopscope.engine.hook_calls import optimizer_groups
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import HookPoint, OptimizerGroup, TrainingHook
from loopscope.loops import epoch_loop, step_loop
from loopscope.training_hooks.measures import spread_indices
from loopscope.training_hooks.updates import AdamDynamics
from loopscope.training_hooks.updates.adam_dynamics import PIECE, adam_update, effective_rates, split_into_pieces
from torch import Tensor, nn

from tests.support import Case, RecordingSink, assert_same_bytes, build, run_info, train

VARIANTS = {
    "adam": (torch.optim.Adam, {}),
    "adam_decay": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adam_decoupled": (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.3}),
    "adamw_no_decay": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "maximize": (torch.optim.AdamW, {"maximize": True}),
    "foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "no_momentum": (torch.optim.Adam, {"betas": (0.0, 0.5), "eps": 1e-3}),
    "tensor_lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01, dtype=torch.float64), "foreach": False}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_reconstructed_update_matches_torch(variant):
    optimizer_class, options = VARIANTS[variant]
    generator = torch.Generator().manual_seed(1)
    model = nn.ParameterDict({name: torch.randn(4, 3, generator=generator).double() for name in "abc"})
    groups = [{"params": [model["a"]]}, {"params": [model["b"], model["c"]], "lr": 0.3, "weight_decay": 0.2}]
    optimizer = optimizer_class(groups, **{"lr": 0.05, **options})
    for step in range(7):
        for name, parameter in model.items():
            parameter.grad = torch.randn(4, 3, generator=generator).double() * 10 / (step + 1) ** 2
            parameter.grad = None if name == "b" and step % 3 == 1 else parameter.grad
        before = {name: parameter.detach().clone() for name, parameter in model.items()}
        optimizer.step()
        for group in optimizer_groups(model, optimizer):
            names = [name for name in group.names if model[name].grad is not None]
            if names:
                states = [optimizer.state[model[name]] for name in names]
                update = adam_update([model[name] for name in names], states, group)
                start = flat({name: before[name] for name in names})
                change = flat({name: model[name].detach() for name in names}) - start
                torch.testing.assert_close(update.total, change, rtol=1e-9, atol=1e-14)
                torch.testing.assert_close(update.before, start, rtol=1e-12, atol=1e-14)


class Path(TrainingHook):
    """Keeps gradients and parameters before every step, and the parameters after it."""

    name = "path"
    hook_points = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})

    def __init__(self) -> None:
        self.before: dict[int, Tensor] = {}
        self.after: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.rates: dict[int, float] = {}
        self.parameters: dict[int, dict[str, Tensor]] = {}

    def compute(self, ctx):
        parameters = {name: value.detach().clone() for name, value in ctx.model.named_parameters()}
        if ctx.hook_point is HookPoint.PRE_UPDATE:
            self.before[ctx.step], self.parameters[ctx.step] = flat(parameters), parameters
            self.gradients[ctx.step] = flat({name: value.grad for name, value in ctx.model.named_parameters()})
            self.rates[ctx.step] = ctx.lr
        else:
            self.after[ctx.step] = flat(parameters)
        return {}

    def describe_metrics(self):
        return []


def flat(vector: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten().clone() for value in vector.values()])


def in_float64(task, state) -> None:
    task.model.double()


def reported_rows(run) -> dict[int, dict[str, float]]:
    """Return the metrics of the hook by step."""
    rows: dict[int, dict[str, float]] = {}
    for name, _, step, value in run.sink.rows("adam_dynamics/"):
        rows.setdefault(step, {})[name.removeprefix("adam_dynamics/")] = value
    return rows


def cosine(a: Tensor, b: Tensor) -> float:
    return (a @ b / (a.norm() * b.norm())).item()


def by_hand(path: Path, eps: float = 1e-8, decay: float = 1e-2) -> dict[int, dict[str, float]]:
    """Run AdamW's recursion over the recorded gradients."""
    first = second = torch.zeros_like(path.before[1])
    rows = {}
    for step, g in path.gradients.items():
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        moment, root = first / (1 - 0.9**step), (second / (1 - 0.999**step)).sqrt()
        rate, update = path.rates[step], path.after[step] - path.before[step]
        shrink = rate * decay * path.before[step].norm()
        rates = torch.quantile(rate / (root + eps), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        rows[step] = {
            "first_moment_norm": moment.norm().item(),
            "second_moment_norm": root.norm().item(),
            "moment_ratio": (moment.norm() / root.norm()).item(),
            "update_norm": update.norm().item(),
            "update_gradient_cosine": cosine(update, -g),
            "moment_gradient_cosine": cosine(moment, g),
            "below_eps_fraction": (root < eps).double().mean().item(),
            "decay_share": (shrink / (shrink + (rate * moment / (root + eps)).norm())).item(),
            "effective_lr_p10": rates[0],
            "effective_lr_median": rates[1],
            "effective_lr_p90": rates[2],
        }
    return rows


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("case", [Case("tied", loop="step"), Case("transformer", "adamw_fused")], ids=str)
def test_metrics_match_recursion_under_a_scheduler(case):
    """The reference is a recursion by hand over nine steps with changing learning rates."""
    path = Path()
    run = train(case, [AdamDynamics(every_n_steps=1), path], steps=9, introduce=in_float64)
    expected = by_hand(path)
    assert len(set(path.rates.values())) > 1
    assert reported_rows(run).keys() == expected.keys() == set(range(1, 10))
    for step, row in expected.items():
        assert reported_rows(run)[step] == pytest.approx(row, rel=1e-6, abs=1e-12, nan_ok=True), step


def test_elements_without_gradient_are_below_eps():
    model = nn.Embedding(10, 4)
    task, state = build(Case("tied"), steps=1)
    batch = torch.tensor([[1, 3], [3, 7]])
    task.model, state.model = model, model
    task.optimizer = state.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    task.compute_loss, task.scheduler = lambda model, _: model(batch).square().sum(), None
    row = only_row(task, state)
    assert row["below_eps_fraction"] == pytest.approx(0.7)


def only_row(task, state, loop=step_loop, **options) -> dict[str, float]:
    """Train one step and return the hook's report."""
    task.length, sink = 1, RecordingSink()
    task.evaluate, task.scheduler = lambda model: {}, None
    reference = options.get("reference_weights")
    manager = HookManager([AdamDynamics()], task, state, loop="step", sinks=[sink], **options)
    manager.start(replace(run_info(task, manager, "step"), reference_weights=reference))
    loop(task, manager)
    return {name.removeprefix("adam_dynamics/"): value for name, _, _, value in sink.rows("adam_dynamics/")}


def test_group_metrics_are_separate_and_add_up():
    task, state = build(Case("tied", loop="step"), steps=1)
    task.model.double()
    parameters = list(task.model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5, "weight_decay": 0.0}]
    task.optimizer = state.optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.2)
    before = [value.detach().clone() for value in parameters]
    row = only_row(task, state)
    changes = [value.detach() - old for value, old in zip(parameters, before, strict=True)]
    norms = {"0": changes[0].norm().item(), "1": math.hypot(*[change.norm().item() for change in changes[1:]])}
    assert row["group_update_norm"] == pytest.approx(norms)
    assert row["update_norm"] == pytest.approx(math.hypot(*norms.values()))
    assert row["group_decay_share"]["0"] > 0
    assert row["group_decay_share"]["1"] == 0
    assert row["group_effective_lr_median"].keys() == {"0", "1"}


def test_coupled_decay_is_reported_separately():
    task, state = build(Case("tied", loop="step"), steps=1)
    task.model.double()
    task.optimizer = state.optimizer = torch.optim.Adam(task.model.parameters(), lr=0.1, weight_decay=0.2)
    before = flat({name: value.detach() for name, value in task.model.named_parameters()})
    row = only_row(task, state)
    gradient = flat({name: value.grad for name, value in task.model.named_parameters()})
    decay = 0.2 * before.norm()
    assert row["coupled_decay_share"] == pytest.approx((decay / (decay + gradient.norm())).item())
    assert "decay_share" not in row


def test_reference_ahead_aligns_with_the_update():
    """The cosine is 1, and the gain is one quarter if the reference is four updates ahead."""
    path = Path()
    train(Case("tied", loop="step"), [path], steps=1, introduce=in_float64)
    task, state = build(Case("tied", loop="step"), steps=1)
    task.model.double()
    after = dict(zip(path.parameters[1], (path.after[1] - path.before[1]).split(sizes(path)), strict=True))
    ahead = {name: value + 4 * after[name].view_as(value) for name, value in path.parameters[1].items()}
    row = only_row(task, state, reference_weights=ahead)
    assert row["update_solution_cosine"] == pytest.approx(1.0)
    assert row["solution_gain"] == pytest.approx(0.25)
    expected = cosine(-path.gradients[1], path.after[1] - path.before[1])
    assert row["gradient_solution_cosine"] == pytest.approx(expected)


def sizes(path: Path) -> list[int]:
    return [value.numel() for value in path.parameters[1].values()]


def test_parameter_without_gradient_is_omitted():
    task, state = build(Case("tied", loop="step"), steps=1)
    task.model.mix.weight.requires_grad_(False)
    task.optimizer = state.optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.1)
    before = {name: value.detach().clone() for name, value in task.model.named_parameters()}
    row = only_row(task, state)
    moved = flat({name: value.detach() - before[name] for name, value in task.model.named_parameters()})
    assert row["update_norm"] == pytest.approx(moved.norm().item(), rel=1e-5)
    assert torch.equal(task.model.mix.weight, before["mix.weight"])


def test_parameters_are_split_in_order():
    sizes = {"a": 10, "b": PIECE - 10, "c": 1, "d": 2 * PIECE, "e": 5}
    parameters = {name: torch.empty(size, device="meta") for name, size in sizes.items()}
    assert list(split_into_pieces(parameters)) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(split_into_pieces({})) == []


@given(st.integers(1, 3000), st.integers(1, 400))
def test_spread_indices_are_distinct_and_even(count, size):
    """The indices ascend and leave no gap above twice the mean spacing."""
    indices = spread_indices(count, size)
    assert len(indices) == len(indices.unique()) == min(count, size)
    assert indices.min() >= 0
    assert indices.max() < count
    ends = torch.cat([torch.tensor([-1]), indices, torch.tensor([count])])
    assert ends.diff().min() >= 1
    assert ends.diff().max() <= 2 * count / len(indices) + 1


def test_sample_represents_very_large_tensor():
    """The tensor is too large for torch.quantile, and the sample's quantile is within 0.1 percent."""
    count = 17_000_000
    root = torch.linspace(0, 1, count).square_()
    group = OptimizerGroup(("w",), lr=1.0, weight_decay=0.0, betas=(0.9, 0.999), options={"eps": 0.5})
    rates = effective_rates(root + group.options["eps"], group, 16384 / count)
    assert len(rates) == 16384
    assert torch.quantile(rates, 0.3).item() == pytest.approx(1 / (0.7**2 + 0.5), rel=1e-3)


@pytest.mark.slow
def test_default_schedule_reports_every_hundredth_step():
    """The first report is at step 1, and the run is unchanged."""
    case = Case("batchnorm_mlp", "adamw_fused", "step")
    run = train(case, [AdamDynamics()], steps=101)
    assert_same_bytes(run, case, 101)
    assert sorted(reported_rows(run)) == [1, 101]


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adafactor"])
def test_another_optimizer_is_refused_before_training(optimizer):
    with pytest.raises(
        UnsuitableError, match=r"'adam_dynamics' reads the moments of torch.optim.Adam or AdamW.*(SGD|Adafactor)"
    ):
        train(Case("tied", optimizer), [AdamDynamics()])


def test_settings_of_current_step_survive_saving():
    """A saved and loaded hook has the same groups and step, and a reset hook has none."""
    task, state = build(Case("tied"))
    hook, fresh = AdamDynamics(every_n_steps=1), AdamDynamics()
    epoch_loop(task, HookManager([hook], task, state))
    file = io.BytesIO()
    torch.save(hook.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert fresh._groups == hook._groups
    assert fresh._step == hook._step == 3
    fresh.reset()
    assert fresh.state_dict() == AdamDynamics().state_dict()


def test_empty_sample_is_refused():
    with pytest.raises(UsageError, match=r"adam_dynamics\.sample is 0"):
        AdamDynamics(sample=0)


@pytest.mark.parametrize(
    ("dtype", "options", "is_finite"),
    [
        (torch.float16, {}, False),
        (torch.float16, {"foreach": True}, False),
        (torch.float16, {"eps": 1e-3}, True),
        (torch.float16, {"fused": True}, True),
        (torch.bfloat16, {}, True),
        (torch.float32, {}, True),
    ],
    ids=str,
)
def test_epsilon_is_rounded_like_the_optimizers(dtype, options, is_finite):
    """In float16 an epsilon of 1e-8 is 0, and an element without a gradient becomes NaN, as the update reports."""
    parameter = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.AdamW([parameter], lr=0.5, weight_decay=0.0, **options)
    parameter.grad = torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=dtype)
    optimizer.step()
    model = nn.ParameterDict({"w": parameter})
    (group,) = optimizer_groups(model, optimizer)
    update = adam_update([parameter], [optimizer.state[parameter]], group)
    assert parameter.isfinite().all().item() is is_finite
    assert update.total.isfinite().all().item() is is_finite
    torch.testing.assert_close(update.total[1:], parameter.detach()[1:].float() - 1, rtol=1e-2, atol=1e-2)
