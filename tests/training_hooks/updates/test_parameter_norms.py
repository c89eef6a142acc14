"""The hook parameter_norms against loops over the elements in float64."""

import json
import math
from functools import partial

import loopscope
import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import HookPoint
from loopscope.training import Precision
from loopscope.training_hooks.clipping import GradClip
from loopscope.training_hooks.measures import WeightCopy
from loopscope.training_hooks.updates import ParameterNorms
from loopscope.training_hooks.updates.parameter_norms import zero_fractions
from torch import nn
from torch.amp import GradScaler

from tests.support import Case, build, mean_loss, run_info, train
from tests.support.ranks import on_ranks
from tests.training_hooks.epoch_end import epoch_end
from tests.training_hooks.ranks.shared_runs import trained
from tests.training_hooks.reloading import through_a_file
from tests.training_hooks.updates.architectures import ARCHITECTURES, Training, trainer_metrics

ALL = {"interval": 1, "names": "*"}


def length(tensors) -> float:
    """Return the joint norm by a loop over the elements."""
    return math.sqrt(math.fsum(value**2 for tensor in tensors for value in tensor.double().flatten().tolist()))


def expected_metrics(before, after, weights, new_weights) -> dict[str, float]:
    changes = {name: new_weights[name] - weights[name] for name in weights}
    norms = {"grad_norm": before, "clipped_grad_norm": after, "weight_norm": weights, "update_norm": changes}
    totals = {f"total_{family}": length(vector.values()) for family, vector in norms.items()}
    families = {f"{family}/{name}": length([v]) for family, vector in norms.items() for name, v in vector.items()}
    zeros = {f"zero_fraction/{name}": float((v == 0).double().mean()) for name, v in before.items()}
    ratios = {
        f"update_ratio/{name}": families[f"update_norm/{name}"] / families[f"weight_norm/{name}"]
        for name in weights
        if families[f"weight_norm/{name}"]
    }
    return totals | families | zeros | ratios


def check(training: Training, tolerance: float = 1e-5) -> None:
    """Compare every metric of every step with brute force."""
    clipped = 0
    for place in training.run():
        if place == "clip":
            before, weights = training.gradients(), training.weights()
        elif place == "update":
            after = training.gradients()
        else:
            expected = expected_metrics(before, after, weights, training.weights())
            is_clipped = expected["total_clipped_grad_norm"] < expected["total_grad_norm"] * (1 - 1e-6)
            expected["clipped_fraction"], clipped = float(is_clipped), clipped + is_clipped
            assert training.metrics == pytest.approx(expected, rel=tolerance, abs=1e-12)
    assert clipped > 0


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


# Every architecture, in attached loops


@pytest.mark.trainer
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_metric_matches_brute_force(name, tmp_path):
    """Two steps of each architecture, with clipping."""
    check(Training(tmp_path, name, "parameter_norms", adamw, options=ALL, steps=2, max_norm=0.05))


@pytest.mark.trainer
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
def test_micro_batches_and_checkpointing_match_brute_force(checkpointing, tmp_path):
    """Gradients are complete after the last micro-batch, also with recomputed activations."""
    settings = {"accumulate": 2, "checkpointing": checkpointing, "steps": 2, "max_norm": 0.05}
    check(Training(tmp_path, "llama", "parameter_norms", adamw, options=ALL, **settings))


@pytest.mark.trainer
def test_bfloat16_weights_match_brute_force(tmp_path):
    """Norms are reduced in float32; the difference of two bfloat16 weights is exact in float32."""
    check(Training(tmp_path, "mixtral", "parameter_norms", adamw, options=ALL, dtype=torch.bfloat16, max_norm=0.05))


def test_lstm_matches_brute_force(tmp_path):
    check(Training(tmp_path, "lstm", "parameter_norms", adamw, options=ALL, steps=2, max_norm=0.05))


@pytest.mark.trainer
def test_trainer_reports_the_norm_that_it_clips(tmp_path):
    """In Hugging Face's Trainer the norm before clipping is the one that it logs."""
    frame, log = trainer_metrics(tmp_path, "parameter_norms", {})
    logged = [row["grad_norm"] for row in log if "grad_norm" in row]
    assert frame["total_grad_norm"].dropna().tolist() == pytest.approx(logged, rel=1e-5)
    assert frame["total_clipped_grad_norm"].dropna().tolist() == pytest.approx([0.1] * 2, rel=1e-4)


# Steps and loops


def run(hooks, case=Case("transformer"), steps=6, **options):  # noqa: B008 - it is frozen
    return train(case, hooks, steps=steps, audit=False, every_step=False, **options)


def values(result, name) -> dict[int, float]:
    """Return the values of a metric by step."""
    return {step: value for key, _, step, value in result.sink.rows(f"parameter_norms/{name}")}


@pytest.mark.longer
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_clipped_share_counts_steps_since_last_report(loop):
    """Reports at steps 1 and 4 cover one and three steps; the table at the end covers all."""
    clip, hook = GradClip(max_norm=2.5), ParameterNorms(interval=3)
    result = run([hook, clip], Case("transformer", loop=loop))
    before, after = values(result, "total_grad_norm"), values(result, "total_clipped_grad_norm")
    is_clipped = [after[step] < before[step] for step in range(1, 7)]
    assert 0 < sum(is_clipped) < 6
    shares = values(result, "clipped_fraction")
    assert shares == {1: float(is_clipped[0]), 4: pytest.approx(sum(is_clipped[1:4]) / 3)}
    assert hook.table() == {"gradients": {"steps": 6, "clipped": sum(is_clipped), "share": sum(is_clipped) / 6}}


@pytest.mark.longer
def test_unclipped_norms_are_equal():
    """Multiplication by 1, as clip_grad_norm_ does below its limit, is no clipping."""
    result = run([ParameterNorms(interval=1), GradClip(max_norm=1e6)])
    assert values(result, "total_grad_norm") == values(result, "total_clipped_grad_norm")
    assert set(values(result, "clipped_fraction").values()) == {0.0}


def test_steps_that_the_scaler_skips_are_left_out():
    def in_float16(task, state) -> None:
        task.compute_loss = Precision.of("fp16", torch.device("cpu")).autocast(mean_loss)
        task.scaler = state.scaler = GradScaler("cpu", init_scale=2.0**17)

    hook = ParameterNorms(interval=1)
    result = run([hook], Case("tied"), introduce=in_float16)
    skipped = result.state.loop.skipped_steps
    norms = values(result, "total_grad_norm")
    assert 0 < skipped == 6 - len(norms)
    assert all(map(math.isfinite, norms.values()))
    assert values(result, "total_update_norm").keys() == norms.keys()
    assert hook.table()["gradients"]["steps"] == len(norms)


def test_loops_without_update_point_report_one_norm(tmp_path):
    """With a closure PRE_UPDATE does not fire: the norm before clipping is reported every interval steps."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    scope = loopscope.attach(
        model,
        optimizer,
        hooks=["parameter_norms"],
        hook_options={"parameter_norms": {"interval": 2}},
        out=tmp_path,
        display="none",
    )

    reported = []
    with scope:
        for batch in scope.batches(torch.ones(3, 4, 3)):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(scope.closure(closure))
            reported.append({k: float(v) for k, v in scope.last_metrics().items() if k.startswith("parameter_norms/")})
    assert {name for metrics in reported for name in metrics} == {"parameter_norms/total_grad_norm"}
    assert reported[0] == reported[1] != reported[2]


def test_resumed_run_reports_the_same(tmp_path):
    """Counts of clipped steps continue from a state that was saved and loaded between two steps."""
    whole, parts = ParameterNorms(interval=5), [ParameterNorms(interval=5), ParameterNorms(interval=5)]
    states = [through_a_file(state) for state in _fed(whole, range(1, 7))]
    _fed(parts[0], range(1, 4))
    parts[1].load_state_dict(through_a_file(parts[0].state_dict()))
    assert [through_a_file(state) for state in _fed(parts[1], range(4, 7))] == states[3:]
    assert parts[1].table() == whole.table()
    assert whole.table()["gradients"]["clipped"] == 3


def _fed(hook, steps) -> list:
    """Feed steps to a hook, of which those with even numbers are clipped; return its state after each step."""
    model = nn.Linear(2, 1)
    states = []
    for step in steps:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        hook.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=step))
        model.weight.grad.mul_(0.5 if step % 2 == 0 else 1)
        hook.compute(epoch_end(model, hook_point=HookPoint.PRE_UPDATE, step=step))
        hook.compute(epoch_end(model, hook_point=HookPoint.POST_STEP, step=step))
        states.append(hook.state_dict())
    return states


# Parameters


def test_sparse_frozen_and_unused_parameters():
    """Sparse gradients count their missing rows as zeros; frozen parameters have no weight norm."""
    model = nn.ModuleDict({"table": nn.Embedding(5, 2, sparse=True), "unused": nn.Linear(2, 1, bias=False)})
    model["frozen"] = nn.Linear(1, 1, bias=False).requires_grad_(False)
    model["table"](torch.tensor([1, 1, 3])).sum().backward()
    assert zero_fractions({"table": model["table"].weight.grad}).tolist() == [pytest.approx(0.6)]
    hook = ParameterNorms(interval=1)
    metrics = {}
    for point in (HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE, HookPoint.POST_STEP):
        metrics |= hook.compute(epoch_end(model, hook_point=point))
    assert metrics["grad_norm/table.weight"] == pytest.approx(math.sqrt(10))
    assert metrics["update_norm/unused.weight"] == 0
    assert not [name for name in metrics if "frozen" in name or name == "grad_norm/unused.weight"]


def test_parameters_of_norm_zero_have_no_ratio():
    """All-zero weights have no relative change."""
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    metrics = _fed_once(ParameterNorms(interval=1), model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert "update_ratio/weight" in metrics
    assert metrics["update_norm/bias"] == pytest.approx(math.sqrt(2))
    assert "update_ratio/bias" not in metrics


def _fed_once(hook, model, optimizer) -> dict:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    metrics = {}
    for point in (HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE, HookPoint.POST_STEP):
        if point is HookPoint.POST_STEP:
            optimizer.step()
        metrics |= hook.compute(epoch_end(model, hook_point=point))
    return metrics


def test_hooks_share_a_copy_of_the_same_weights():
    model = nn.Linear(2, 2)
    first = WeightCopy.of(model)
    assert WeightCopy.of(model) is first
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    assert WeightCopy.of(model) is not first
    assert torch.equal(first["weight"], before)
    assert first.change_norms({"weight": model.weight}).item() == pytest.approx(2)


# Budget


def test_default_reports_at_most_eight_per_family():
    result = run([ParameterNorms()], steps=1)
    reported = [name.removeprefix("parameter_norms/") for name, *_ in result.sink.rows("parameter_norms/")]
    for family in ("grad_norm", "clipped_grad_norm", "zero_fraction", "weight_norm", "update_norm", "update_ratio"):
        members = [name for name in reported if name.startswith(f"{family}/")]
        assert len(members) == 8, family
    clipped, before = (
        {name.partition("/")[2] for name in reported if name.startswith(f"{family}/")}
        for family in ("clipped_grad_norm", "grad_norm")
    )
    assert clipped == before


def test_file_has_every_parameter(tmp_path):
    """One line for each reported step, with every family and parameter."""
    hook = ParameterNorms(interval=2, top=0, bottom=0, write_all=True)
    model = nn.Linear(3, 2)
    hook._file._path = tmp_path / "all.jsonl"
    _fed_once(hook, model, torch.optim.SGD(model.parameters(), lr=1.0))
    (line,) = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert line.pop("step") == 1
    assert len(line) == 6
    assert all(list(family) == ["weight", "bias"] for family in line.values())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"interval": 0}, r"parameter_norms\.interval is 0; it must be at least 1\."),
        ({"top": -1}, r"parameter_norms\.top is -1; it must be at least 0\."),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        ParameterNorms(**options)


def test_unknown_names_and_untrained_models_are_refused():
    with pytest.raises(UsageError, match=r"parameter_norms\.names has the pattern 'nothing', which matches none"):
        run([ParameterNorms(names="nothing")])
    task, state = build(Case())
    hook = ParameterNorms()
    info = run_info(task, HookManager([hook], task, state), "epoch")
    task.model.requires_grad_(False)
    with pytest.raises(UnsuitableError, match="needs trainable parameters, but the model has none"):
        hook.start(info)


# Ranks


def _trained(kind: str):
    metrics = trained(kind, [ParameterNorms(**ALL), GradClip(max_norm=0.3)], tied=False, recipe=None)["metrics"]
    return {f"{name} at step {step}": float(v) for (name, _, step), v in metrics.items() if "parameter_norms" in name}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "TP"])
def test_three_ranks_match_one_process(kind, tmp_path):
    expected = _trained("one process")
    for rank in on_ranks(partial(_trained, kind), tmp_path, 3):
        assert rank == pytest.approx(expected, rel=1e-9, abs=1e-12)
