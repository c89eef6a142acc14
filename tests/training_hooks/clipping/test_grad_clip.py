"""The rules of grad_clip against torch's functions, published code and given norms."""

import math
from collections.abc import Callable

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint
from loopscope.state import TrainingState
from loopscope.tensors import trainable
from loopscope.training import Precision, TrainingTask, forward_backward, update
from loopscope.training_hooks.clipping import GradClip
from loopscope.training_hooks.clipping.adaptive_clipping import AdaGC, Gammas, ZClip
from loopscope.training_hooks.clipping.grad_clip import clamp_statistics
from torch import nn

from tests.framework.hooks.context_call import context
from tests.support import MODELS, OPTIMIZERS, Case, Run, SpyHook, at, build, mean_loss, train
from tests.support.cases import matrix, some_of
from tests.training_hooks.device_waits import DeviceWaits
from tests.training_hooks.reloading import through_a_file

STEPS = 6
RULES = ("norm", "value", "parameter", "norm_sum", "zclip", "adagc")
SHORT = {"zclip": {"warmup": 5}, "adagc": {"warmup": 5}}
"""Warm-ups that end within a short run."""
COMMON = {"norm_before", "norm_after", "clipped"}
METRICS = {
    "norm": COMMON | {"coefficient"},
    "value": COMMON | {"clipped_fraction"},
    "parameter": COMMON | {"coefficient", "clipped_fraction"},
    "norm_sum": COMMON | {"coefficient"},
    "zclip": COMMON | {"coefficient", "mean", "std", "z", "threshold"},
    "adagc": COMMON | {"coefficient", "clipped_fraction", "gamma_ratio"},
}
BY_TORCH: dict[str, tuple[str, Callable[[nn.Module, float], object]]] = {
    "norm": ("max_norm", lambda model, limit: torch.nn.utils.clip_grad_norm_(model.parameters(), limit)),
    "value": ("max_value", lambda model, limit: torch.nn.utils.clip_grad_value_(model.parameters(), limit)),
    "parameter": (
        "max_norm",
        lambda model, limit: [torch.nn.utils.clip_grad_norm_([each], limit) for each in model.parameters()],
    ),
}


def joint_norm(model: nn.Module) -> float:
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.nn.utils.get_total_norm(grads).item()


def hand_written(case: Case, clip: Callable[[nn.Module], object]) -> tuple[TrainingTask, list[list[float]]]:
    """Train with ``clip`` between backward and update; return the norms before and after it."""
    task, _ = build(case, steps=STEPS)
    norms = []
    for epoch in range(STEPS // len(task.loader)):
        for batch in task.loader.batches(epoch):
            forward_backward(task, batch)
            norms.append([joint_norm(task.model)])
            clip(task.model)
            norms[-1].append(joint_norm(task.model))
            update(task, step_scheduler=False)
        task.scheduler.step()
    return task, norms


def column(run: Run, metric: str) -> list[float]:
    return [row[3] for row in run.sink.rows(f"grad_clip/{metric}") if row[0] == f"grad_clip/{metric}"]


def typical(case: Case, rule: str) -> float:
    """Return a limit that some gradients of the run exceed and some do not."""
    seen: list[float] = []

    def look(model: nn.Module) -> None:
        grads = [parameter.grad for parameter in model.parameters()]
        parts = {"norm": [torch.stack([g.norm() for g in grads]).norm()], "parameter": [g.norm() for g in grads]}
        seen.extend(float(part) for part in parts.get(rule, [g.abs().max() for g in grads]))

    hand_written(case, look)
    return sorted(seen)[len(seen) // 2]


@pytest.mark.guarantee("numbers-match-plain-formulas")
@matrix("model, optimizer, rule", MODELS, OPTIMIZERS, BY_TORCH)
def test_clipping_matches_torch_functions(model, optimizer, rule):
    """A run with the hook equals a hand-written loop with the clip function of torch, bit for bit."""
    case, (option, clip) = Case(model, optimizer), BY_TORCH[rule]
    limit = typical(case, rule)
    task, norms = hand_written(case, lambda model: clip(model, limit))
    run = train(case, [GradClip(method=rule, **{option: limit})], steps=STEPS)
    for expected, found in zip(task.model.parameters(), run.task.model.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert column(run, "norm_before") == pytest.approx([before for before, _ in norms], rel=1e-6)
    assert column(run, "norm_after") == pytest.approx([after for _, after in norms], rel=1e-5)
    shares = column(run, "clipped" if rule == "norm" else "clipped_fraction")
    assert 0 < sum(shares) < STEPS


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("rule", RULES)
def test_reported_metrics_match_descriptions(rule):
    """Each rule reports its documented metrics, and all of them are described."""
    run = train(Case(), [GradClip(method=rule, **SHORT.get(rule, {}))], steps=9)
    assert {row[0].removeprefix("grad_clip/") for row in run.sink.rows("grad_clip")} == METRICS[rule]
    assert set().union(*METRICS.values()) == {info.name for info in GradClip(method=rule).describe_metrics()}


def by_the_sum_of_norms(model: nn.Module, limit: float) -> None:
    """Clip as the published Metis code does."""
    total = sum(parameter.grad.norm().item() for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.grad *= 1 if limit > total else limit / total


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_sum_of_norms_matches_published_code(share):
    found, expected = (build(Case("transformer")) for _ in range(2))
    for task, _ in (found, expected):
        forward_backward(task, next(iter(task.loader.batches(0))))
    limit = share * sum(parameter.grad.norm().item() for parameter in expected[0].model.parameters())
    by_the_sum_of_norms(expected[0].model, limit)
    HookManager([GradClip(method="norm_sum", max_norm=limit)], *found).fire(HookPoint.POST_BACKWARD)
    for one, other in zip(found[0].model.parameters(), expected[0].model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0)


def test_metrics_describe_the_change_of_norm():
    free = column(train(Case(), [GradClip(max_norm=1e9)]), "norm_before")
    run = train(Case(), [GradClip(max_norm=free[0] / 4)], steps=1)
    assert column(run, "norm_before")[0] == free[0]
    assert column(run, "norm_after")[0] == pytest.approx(free[0] / 4, rel=1e-5)
    assert column(run, "coefficient")[0] == pytest.approx(0.25, rel=1e-5)
    assert column(run, "clipped")[0] == 1.0


def test_clipped_share_and_norm_are_exact():
    """The share of elements beyond the limit and the norm after clamping match a manual calculation."""
    vector = {"a": torch.tensor([3.0, -4.0, 0.5]), "b": torch.tensor([[1.0, -1.0]])}
    share, norm = clamp_statistics(vector, 1.0)
    assert share == pytest.approx(2 / 5)
    assert norm == pytest.approx(math.sqrt(4.25))
    assert clamp_statistics({"a": torch.tensor([math.nan, 2.0])}, 1.0)[0] == 0.5


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("options", [{"max_norm": 1e9}, {"method": "value", "max_value": 1e9}, {"method": "zclip"}])
def test_gradients_within_limit_are_unchanged(options):
    """The run has the bytes of the run without the hook, and no step is reported as clipped."""
    loose, bare = train(Case(), [GradClip(**options)]), train(Case())
    assert loose.final == bare.final
    assert set(column(loose, "clipped")) == {0.0}


# Histories


class Planted:
    """Given gradients of a model at each step, with a clip hook."""

    def __init__(self, **options) -> None:
        self.task, self.state = build(Case("tied"))
        self.hook = GradClip(**options)
        self.manager = HookManager([self.hook], self.task, self.state, audit=True)
        self.named = trainable(self.task.model)

    def step(self, norms: list[float]) -> list[float]:
        """Give every parameter a gradient with its norm, and return the norms after clipping."""
        self.state.loop.step += 1
        for parameter, norm in zip(self.named.values(), norms, strict=True):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.view(-1)[self.state.loop.step % parameter.numel()] = norm
        self.manager.fire(HookPoint.POST_BACKWARD)
        return [float(parameter.grad.norm()) for parameter in self.named.values()]


def planted_norms(steps: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(0)
    rows = (1 + 0.1 * torch.randn(steps, 3, generator=generator)).tolist()
    for at_step, parameter, size in ((30, 0, 20.0), (31, 1, 5.0), (55, 2, 1e4)):
        rows[at_step][parameter] *= size
    return rows


@pytest.mark.longer
def test_zclip_gradients_match_the_rule():
    """The hook clips the planted spikes and only a few other steps."""
    planted, history, spikes = Planted(method="zclip"), torch.zeros(3, dtype=torch.float64), []
    for number, row in enumerate(planted_norms(70)):
        expected = ZClip(alpha=0.97, z_threshold=2.5, warmup=25)(history, torch.tensor(row).norm())
        assert planted.step(row) == pytest.approx([norm * expected.factor.item() for norm in row], rel=1e-5)
        history = expected.history
        spikes += [number] if expected.factor < 1 else []
    assert {30, 31, 55} <= set(spikes)
    assert len(spikes) < 7


@pytest.mark.longer
def test_adagc_gradients_match_the_rule():
    """The hook applies the factors of the rule and stores the parameter names in its state."""
    planted, gammas = Planted(method="adagc", warmup=10, lambda_abs=1.5), Gammas()
    rule = AdaGC(beta=0.98, lambda_rel=1.05, lambda_abs=1.5, warmup=10)
    for row in planted_norms(70):
        expected = rule(gammas.take("abc", torch.device("cpu")), gammas.taken, torch.tensor(row))
        gammas.put("abc", expected)
        assert planted.step(row) == pytest.approx((torch.tensor(row) * expected.factors).tolist(), rel=1e-5)
    assert planted.hook.state_dict()["gammas"]["names"] == [*planted.named]


@pytest.mark.longer
@pytest.mark.parametrize("rule", ["zclip", "adagc"])
@pytest.mark.parametrize("at_step", some_of([10, 3, 40], 3))
def test_resumed_clipping_matches_uninterrupted_clipping(rule, at_step):
    """A hook whose state was saved and restored clips the remaining steps identically."""
    whole, rows = Planted(method=rule, warmup=10), planted_norms(60)
    expected = [whole.step(row) for row in rows]
    first, second = Planted(method=rule, warmup=10), Planted(method=rule, warmup=10)
    found = [first.step(row) for row in rows[:at_step]]
    second.hook.load_state_dict(through_a_file(first.hook.state_dict()))
    second.state.loop.step = at_step
    assert found + [second.step(row) for row in rows[at_step:]] == expected


def test_the_history_of_another_rule_is_left():
    zclip, adagc = Planted(method="zclip"), Planted(method="adagc")
    zclip.step([1.0] * 3), adagc.step([1.0] * 3)
    fresh = GradClip(method="adagc").state_dict()
    adagc.hook.load_state_dict(zclip.hook.state_dict())
    assert repr(adagc.hook.state_dict()) == repr(fresh)
    zclip.hook.reset()
    assert repr(zclip.hook.state_dict()) == repr(GradClip(method="zclip").state_dict())


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("rule", ["zclip", "adagc"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_gradients_are_left_unchanged(rule, bad):
    """The gradients and the history keep their values."""
    planted = Planted(method=rule, warmup=10)
    for row in planted_norms(70)[:20]:
        planted.step(row)
    before = repr(planted.hook.state_dict()).replace("'calls': 20", "'calls': 21")
    found = planted.step([9.0, bad, 2.0])
    assert found[::2] == [9.0, 2.0]
    assert not math.isfinite(found[1])
    assert repr(planted.hook.state_dict()) == before


@pytest.mark.parametrize("rule", RULES)
def test_missing_gradients_change_no_history(rule):
    """A step without gradients leaves the state unchanged, and only the rule norm may report metrics."""
    planted = Planted(method=rule)
    planted.task.optimizer.zero_grad()
    planted.manager.fire(HookPoint.POST_BACKWARD)
    metrics = planted.manager.delivery.last()
    assert metrics == {} or rule == "norm"
    assert repr(planted.hook.state_dict()) == repr(GradClip(method=rule).state_dict())


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_waits_for_a_device(rule):
    model_ctx, hook = context(mutates=False), GradClip(method=rule)
    with DeviceWaits() as waits:
        for _ in range(3):
            metrics = hook.intervene(None, model_ctx)
        model_ctx._open.commits.apply()
        assert waits.count == 0
        assert float(metrics["norm_before"]) > 0
    assert waits.count == 1


# Precision


@pytest.mark.parametrize("rule", ["norm", "parameter"])
def test_float16_gradients_with_overflowing_norm_are_scaled(rule):
    """A norm beyond the range of float16 scales the gradients and does not set them to zero."""
    task, state = build(Case("transformer"))
    for parameter in task.model.half().parameters():
        parameter.grad = torch.full_like(parameter, 3000.0)
    count = sum(parameter.numel() for parameter in task.model.parameters())
    assert 3000 * math.sqrt(count) > torch.finfo(torch.float16).max
    HookManager([GradClip(method=rule, max_norm=100.0)], task, state).fire(HookPoint.POST_BACKWARD)
    for parameter in task.model.parameters():
        together = count if rule == "norm" else parameter.numel()
        expected = torch.full_like(parameter, min(3000, 100 / math.sqrt(together)))
        torch.testing.assert_close(parameter.grad, expected, rtol=2e-3, atol=0)


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("rule", RULES)
def test_skipped_float16_steps_leave_no_trace(rule):
    """Histories count only the steps that the loss scaler did not skip."""

    def in_float16(task: TrainingTask, state: TrainingState) -> None:
        precision = Precision.of("fp16", torch.device("cpu"))
        task.compute_loss = precision.autocast(mean_loss)
        task.scaler = state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)

    hook = GradClip(method=rule, **SHORT.get(rule, {}))
    run = train(Case("tied", "sgd_momentum"), [hook], steps=30, introduce=in_float16)
    assert 5 < run.state.loop.skipped_steps < 25
    assert all(parameter.isfinite().all() for parameter in run.task.model.parameters())
    kept, updates = hook.state_dict(), 30 - run.state.loop.skipped_steps
    taken = {"zclip": lambda: kept["history"][0], "adagc": lambda: kept["gammas"]["taken"]}
    assert taken.get(rule, lambda: updates)() == updates


# Options


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.inf, math.nan])
def test_invalid_max_norm_is_refused(max_norm):
    with pytest.raises(UsageError, match=f"grad_clip.max_norm is {max_norm}; it must be a positive number"):
        GradClip(max_norm=max_norm)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "zklip"}, "Unknown grad_clip.method 'zklip'. Did you mean 'zclip'"),
        ({"method": "value", "max_value": 0.0}, "grad_clip.max_value is 0.0; it must be a positive number"),
        ({"method": "zclip", "alpha": 1.0}, r"grad_clip.alpha is 1.0; it must be in \[0, 1\)"),
        ({"method": "zclip", "z_threshold": -2.0}, "grad_clip.z_threshold is -2.0; it must be a positive"),
        ({"method": "zclip", "warmup": 1}, "grad_clip.warmup is 1; it must be at least 2 steps, or 0"),
        ({"method": "adagc", "beta": -0.1}, "grad_clip.beta is -0.1; it must be in"),
        ({"method": "adagc", "lambda_rel": 0.9}, "grad_clip.lambda_rel is 0.9; it must be a number of at least 1"),
        (
            {"method": "value", "max_norm": 2.0},
            "max_norm is 2.0, but method 'value' has no such option: it belongs to ",
        ),
        (
            {"max_value": 2.0},
            "max_value is 2.0, but method 'norm' has .* belongs to 'value', and 'norm' takes max_norm",
        ),
        ({"method": "parameter", "warmup": 9}, "warmup is 9, but .* it belongs to 'zclip' and 'adagc'"),
        ({"method": "adagc", "alpha": 0.5}, "alpha is 0.5, but .* 'adagc' takes beta, lambda_rel, lambda_abs, warmup"),
    ],
)
def test_unsuitable_clip_options_are_refused(options, sentence):
    """Invalid values and options of another method raise a UsageError."""
    with pytest.raises(UsageError, match=sentence):
        GradClip(**options)


def test_a_later_hook_finds_the_gradients_clipped():
    norms: list[float] = []
    spy = at(SpyHook, HookPoint.PRE_UPDATE)(lambda ctx: norms.append(joint_norm(ctx.model)) or {})
    train(Case(), [spy, GradClip(method="parameter", max_norm=0.01)])
    assert norms
    assert max(norms) <= 0.01 * math.sqrt(6) * 1.001
