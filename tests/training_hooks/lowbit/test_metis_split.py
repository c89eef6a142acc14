"""The split of low-bit weights in a run: schedule, draws, unchanged state, and other hooks."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from loopscope.checkpoints import load_checkpoint, save_checkpoint
from loopscope.engine import HookManager
from loopscope.errors import HookError, UnsuitableError, UsageError
from loopscope.hooks import EVERY_STEP, HookPoint, HookRegistry, InterventionHook, TrainingHook
from loopscope.loops import step_loop
from loopscope.lowbit import BitLinear, MetisOptions, Recipe, quantize_model
from loopscope.lowbit.casts import Cast
from loopscope.lowbit.recipes import uniform
from loopscope.runs.reference import load_reference
from loopscope.state.digest import described
from loopscope.tensors import copied
from loopscope.training import Precision
from loopscope.training_hooks.lowbit import MetisSplit
from loopscope.training_hooks.lowbit.metis_split import schedule
from torch import Tensor, nn

from tests import support
from tests.support import (
    LOOPS,
    OPTIMIZERS,
    ActingHook,
    Case,
    ReadOnlyHook,
    Run,
    Saving,
    SpyHook,
    WatchedManager,
    at,
    build,
    data_for,
    mean_loss,
    run_info,
    train,
)
from tests.training_hooks.interrupted import in_one_and_two

OPTIONS = MetisOptions(rank=0.5, forward_warmup_steps=2, merge_steps=3)
RECIPES = {
    "exact": Recipe("exact", metis=OPTIONS),
    "lowbit": replace(uniform("lowbit", Cast("e2m1", "block", "stochastic")), metis=OPTIONS),
}
BASES = {"mlp": "batchnorm_mlp", "transformer": "transformer", "tied": "tied"}
STEPS = 7
QUIET = [hook.name for hook in HookRegistry if not (issubclass(hook, InterventionHook) and hook.commits)]
SOME = ("norms", "weight_updates", "training_diagnostics", "weight_tracking", "path_length", "gradient_overflow")


def low_bit(base: str, recipe: Recipe) -> nn.Module:
    model = support.MODELS[base]()
    quantize_model(model, recipe)
    return model


@pytest.fixture(autouse=True)
def _low_bit_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, base in BASES.items():
        for kind, recipe in RECIPES.items():
            make = lambda base=base, recipe=recipe: low_bit(base, recipe)
            monkeypatch.setitem(support.MODELS, f"{kind}_{name}", make)
    monkeypatch.setattr(support.runs, "data_for", lambda model: data_for(BASES.get(model.partition("_")[2], model)))


@pytest.fixture(autouse=True)
def _without_notices() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "weight_updates check(s|ed)|Step [0-9,]+")
        yield


def layers(model: nn.Module) -> dict[str, BitLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, BitLinear) and m.factors is not None}


def merged(model: nn.Module) -> dict[str, Tensor]:
    return {name: layer.merged_weight().clone() for name, layer in layers(model).items()}


@cache
def split_run(case: Case) -> Run:
    return train(case, [MetisSplit()], steps=STEPS)


# When, and what


@pytest.mark.longer
def test_splits_follow_warmup_and_merge_steps():
    """Weights are split after the warm-up and then every merge_steps steps."""
    rows = split_run(Case("lowbit_mlp")).sink.rows("metis_split/layers")
    assert rows == [("metis_split/layers", HookPoint.PRE_STEP, step, 2) for step in (3, 6, 9)]


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["exact_mlp", "exact_transformer", "lowbit_tied"])
def test_splits_keep_merged_weights(model, optimizer):
    """Each split makes new factors, and every merged weight keeps its value."""

    class Watching(WatchedManager):
        def watch_call(self, point: HookPoint, call: Callable[[], None]) -> None:
            before, old = merged(self.task.model), copied(dict(self.task.model.named_parameters()))
            call()
            if point is HookPoint.PRE_STEP and self.state.loop.step in (3, 6):
                for name, layer in layers(self.task.model).items():
                    torch.testing.assert_close(layer.merged_weight(), before[name], rtol=1e-5, atol=1e-6)
                    assert layer.is_split
                    assert not torch.equal(layer.factors.s, old[f"{name}.factors.s"])
                    checked.append(name)

    checked: list[str] = []
    train(Case(model, optimizer), [MetisSplit()], steps=STEPS, manager_class=Watching, audit=False, every_step=False)
    assert len(checked) == 2 * len(set(checked)) > 0


@pytest.mark.longer
def test_split_without_casts_keeps_the_loss():
    """Losses are equal up to the step of the split and differ after updates of the factors."""
    losses = lambda hooks: [loss for _, _, _, loss in train(Case("exact_mlp"), hooks, steps=6).sink.rows("spy/loss")]
    watch = lambda: at(SpyHook, HookPoint.POST_BACKWARD)(lambda ctx: {"loss": ctx.loss})
    plain, parted = losses([watch()]), losses([MetisSplit(), watch()])
    torch.testing.assert_close(torch.tensor(parted[:3]), torch.tensor(plain[:3]), rtol=1e-5, atol=1e-6)
    assert abs(parted[5] - plain[5]) > 1e-4


@pytest.mark.longer
def test_split_resets_only_factor_optimizer_state():
    """The step counters of the factors restart, and those of all other parameters continue."""
    steps = {}

    def watch(run_ctx, ctx):
        steps[run_ctx.step] = {name: int(state["step"]) for name, state in ctx.optimizer_state.items()}

    train(Case("lowbit_mlp"), [MetisSplit(), at(ReadOnlyHook, HookPoint.POST_STEP)(watch)], steps=STEPS)
    factors = {name for name in steps[7] if "factors" in name}
    assert not any("factors" in name for name in steps[2])
    assert len(factors) == 6
    assert {steps[5][name] for name in factors} == {3}
    assert {steps[6][name] for name in factors} == {1}
    assert {count for name, count in steps[6].items() if name not in factors} == {6}


def test_metrics_match_the_decomposition():
    tables: dict[str, list[Tensor]] = {}

    def spy(name: str, point: HookPoint, read) -> SpyHook:
        keep = lambda ctx: tables.update({name: [read(m).double() for m in layers(ctx.model).values()]})
        return at(SpyHook, point, name=name)(keep)

    watch = spy("whole", HookPoint.PRE_STEP, lambda layer: layer.merged_weight())
    keep = spy("rest", HookPoint.POST_BACKWARD, lambda layer: layer.weight.detach().clone())
    run = train(Case("exact_transformer"), [watch, MetisSplit(), keep], steps=3)
    found = {name.removeprefix("metis_split/"): value for name, _, _, value in run.sink.rows("metis_split/")}
    whole, rest = tables["whole"], tables["rest"]
    left, energy = (float(sum(value.square().sum() for value in table)) for table in (rest, whole))
    assert found["residual_share"] == pytest.approx(left / energy, rel=1e-5)
    ratios = [float(r.abs().max() / w.abs().max()) for r, w in zip(rest, whole, strict=True)]
    assert found["range_ratio"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    assert 0 < found["reconstruction_error"] < 1e-6
    assert found["layers"] == len(whole)


def test_frozen_weight_is_not_split():
    freeze = lambda task, state: task.model.get_submodule("0").weight.requires_grad_(False)
    run = train(Case("lowbit_mlp"), [MetisSplit()], steps=3, introduce=freeze)
    assert [layer.is_split for layer in layers(run.task.model).values()] == [False, True]


@pytest.mark.slow
def test_split_draws_depend_on_seed_and_step():
    """A hook that draws random numbers does not change the split."""
    drawing = at(SpyHook, HookPoint.PRE_STEP)(lambda ctx: {"draw": torch.rand(())})
    alone, with_spy = (
        train(Case("lowbit_mlp"), hooks, steps=STEPS) for hooks in ([MetisSplit()], [drawing, MetisSplit()])
    )
    assert alone.digests == with_spy.digests


# Resuming from a checkpoint


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("model", ["lowbit_mlp", "exact_transformer"])
@pytest.mark.parametrize("loop", LOOPS)
def test_resume_after_split_matches_uninterrupted_run(loop, model, tmp_path):
    """The final state and the later rows of the resumed run are the same."""
    whole, second, middle = in_one_and_two(Case(model, loop=loop), MetisSplit, tmp_path)
    assert second.final == whole.final
    assert second.rows == whole.after(middle)
    assert any(row[0] == "metis_split/layers" for row in second.rows)


def test_checkpoint_restores_split_model(tmp_path):
    """A fresh model that loads the checkpoint has the same factors."""
    run = split_run(Case("lowbit_mlp"))
    save_checkpoint(tmp_path / "split.pt", run.state, {}, run.state.streams.save())
    task, state = build(Case("lowbit_mlp"))
    load_checkpoint(tmp_path / "split.pt", state)
    assert all(layer.is_split for layer in layers(task.model).values())
    assert described(dict(task.model.named_parameters())) == described(dict(run.task.model.named_parameters()))


def test_split_weights_are_a_valid_reference(tmp_path):
    """A plain model and a low-bit model both load the final weights as reference."""
    run = split_run(Case("exact_mlp"))
    path = tmp_path / "weights.pt"
    torch.save(run.task.model.state_dict(), path)
    for model in (support.MODELS["batchnorm_mlp"](), support.MODELS["exact_mlp"]()):
        found = load_reference(path, model).weights
        assert set(found) == {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}


# Other hooks


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("name", SOME)
def test_other_hooks_change_no_bits(name):
    """Selected hooks next to the split leave the run unchanged."""
    assert check_neutral(name, Case("lowbit_mlp"))


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("model", BASES)
@pytest.mark.parametrize("name", QUIET)
def test_every_hook_is_neutral_or_refuses(name, model, loop):
    """Each hook next to the split changes no bit or raises an error, on every model and loop."""
    check_neutral(name, Case(f"lowbit_{model}", loop=loop))


def check_neutral(name: str, case: Case) -> bool:
    """Fail if a hook next to the split changes the run; return whether the hook ran."""
    reference = copied(dict(split_run(case).task.model.named_parameters()))
    hooks = [MetisSplit(), made(name)]
    run = train(case, hooks, steps=STEPS, reference_weights=reference, raises=(UsageError,))
    if run.error is None:
        assert run.digests == split_run(case).digests
    else:
        assert isinstance(run.error, UnsuitableError)
    return run.error is None


def made(name: str) -> TrainingHook:
    hook = HookRegistry.get(name)()
    hook.step_schedule = EVERY_STEP
    return hook


@pytest.mark.parametrize("name", ["model_smoothing", "weight_average"])
def test_weight_mixing_hooks_refuse_split_models(name):
    """The error of model_smoothing and weight_average names the split layers."""
    with pytest.raises(UnsuitableError, match=f"'{name}' .* a Metis split changes the meaning of the weights of 0, 4"):
        train(Case("lowbit_mlp"), [MetisSplit(), made(name)])


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("method", ["norm", "value", "parameter", "zclip", "adagc"])
def test_factor_gradients_are_clipped(method):
    """Every clipping method works on a split model and leaves all parameters finite."""
    norms = {}
    options = {"zclip": {"warmup": 2}, "adagc": {"warmup": 4}}.get(method, {})
    clip = HookRegistry.get("grad_clip")(method=method, **options)

    def watch(ctx):
        norms[ctx.step] = {name: p.grad.abs().max() for name, p in ctx.model.named_parameters() if p.grad is not None}

    run = train(Case("lowbit_mlp"), [MetisSplit(), clip, at(SpyHook, HookPoint.PRE_UPDATE)(watch)], steps=STEPS)
    assert {name for name in norms[7] if "factors" in name}
    assert all(parameter.isfinite().all() for parameter in run.task.model.parameters())
    assert {row[2] for row in run.sink.rows("grad_clip/coefficient")} in ({*range(1, 10)}, set())


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("needs_pre_epoch", [True, False])
def test_intervention_across_split_is_rolled_back(needs_pre_epoch):
    """An intervention that restores the state before the split leaves the run unchanged."""

    def go_back(run_ctx, ctx):
        if needs_pre_epoch and run_ctx.epoch == 0:
            assert all(layer.is_split for layer in layers(ctx.model).values())
            ctx.restore_pre_epoch()
            assert not any(layer.is_split for layer in layers(ctx.model).values())
        ctx.take_step(next(run_ctx.loader.batches(0)))

    hook = at(ActingHook, HookPoint.POST_EPOCH, needs_pre_epoch_state=needs_pre_epoch)(go_back)
    case = Case("lowbit_mlp")
    assert train(case, [MetisSplit(), hook], steps=STEPS).digests == split_run(case).digests


# Other ways to train


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("amp", ["fp16", "bf16"])
def test_mixed_precision_trains_split_layers(amp):
    """Training works in float16 and bfloat16, and float16 skips overflowing steps."""

    def introduce(task, state):
        task.compute_loss = Precision.of(amp, torch.device("cpu")).autocast(mean_loss)
        if amp == "fp16":
            task.scaler = state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=1000)

    case = Case("lowbit_tied")
    run = train(case, [MetisSplit()], steps=15, introduce=introduce, audit=False, accumulation_steps=2)
    assert all(parameter.isfinite().all() for parameter in run.task.model.parameters())
    assert all(layer.is_split for layer in layers(run.task.model).values())
    assert (0 < run.state.loop.skipped_steps < 12) is (amp == "fp16")


@pytest.mark.compile
def test_compiled_split_model_matches_eager_one():
    compiled = lambda task, state: task.model.compile(backend="eager", dynamic=False)
    case = Case("lowbit_mlp")
    try:
        run = train(case, [MetisSplit()], steps=STEPS, introduce=compiled, audit=False, every_step=False)
    finally:
        torch.compiler.reset()
    expected = dict(split_run(case).task.model.named_parameters())
    assert described(dict(run.task.model.named_parameters())) == described(expected)


# Refusals


def test_unsplittable_model_is_refused():
    with pytest.raises(UnsuitableError, match="'metis_split' needs low-bit layers that can be split"):
        train(Case(), [MetisSplit()])


def test_different_split_schedules_are_refused():
    """All layers of a model must be split at the same steps."""
    with pytest.raises(UsageError, match=r"\(forward_warmup_steps, merge_steps\) \(2, 3\) and \(5, 3\)"):
        schedule({OPTIONS, replace(OPTIONS, forward_warmup_steps=5)}, 10)


def test_merge_steps_of_0_split_once():
    times = schedule({replace(OPTIONS, merge_steps=0)}, 100)
    assert [step for step in range(1, 101) if times.is_due(step)] == [3]


def test_optimizer_without_factors_is_refused():
    """The error at the first split names the layers."""

    def forget(task, state):
        task.optimizer.param_groups[0]["params"] = [p for p in task.model.parameters() if p.requires_grad]

    with pytest.raises(HookError, match="needs an optimizer that trains the factors of 0, 4"):
        train(Case("lowbit_mlp"), [MetisSplit()], introduce=forget)


def test_warmup_longer_than_run_causes_warning():
    task, state = build(Case("lowbit_mlp", loop="step"), steps=2)
    hook = MetisSplit()
    with pytest.warns(UserWarning, match="splits no weights: the run has 2 steps, but forward_warmup_steps is 2"):
        hook.start(run_info(task, HookManager([hook], task, state, loop="step"), "step"))


@pytest.mark.slow
@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.filterwarnings("ignore:gradient_overflow")
def test_overflow_ledger_continues_after_split(tmp_path):
    """A run resumed from a checkpoint after a split has the same tables and sums_of_counts."""

    def run(path, write):
        task, state = build(Case("lowbit_mlp", loop="step"), length=STEPS)
        hooks = [MetisSplit(), HookRegistry.get("gradient_overflow")(formats="e2m1,e4m3", interval=1, of="gradients")]
        manager = HookManager(hooks, task, state, loop="step")
        if not write:
            manager.hooks.load_state_dict(load_checkpoint(path, state))
        manager.start(run_info(task, manager, "step"))
        pauses = Saving(manager, 1, lambda: state.loop.step == 4 and write and save_checkpoint(
            path, state, manager.hooks.state_dict(), manager.isolation.run_streams))  # fmt: skip
        step_loop(task, manager, pauses=pauses)
        manager.end("completed")
        return manager.hooks.tables["gradient_overflow"], hooks[1].state_dict()["ledgers"]["gradients"]

    (whole, sums_of_counts), (resumed, after) = run(tmp_path / "4.pt", True), run(tmp_path / "4.pt", False)
    assert any("factors" in layer for layer in sums_of_counts["layers"])
    assert resumed == whole
    assert after["layers"] == sums_of_counts["layers"]
    assert torch.equal(after["run"]["sums"], sums_of_counts["run"]["sums"])
