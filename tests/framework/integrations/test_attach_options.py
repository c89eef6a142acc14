"""Options of attach without other tests: reference, schedules, sinks by name, a silent display."""

import json
import warnings
from dataclasses import MISSING, fields
from inspect import signature

import pytest
import torch
from loopscope import attach, read_run
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import HookPoint, SinkRegistry, StepSchedule
from loopscope.integrations.attach_options import AttachArguments, AttachOptions
from loopscope.sinks import CSVSink
from torch import nn

from tests.framework.integrations.custom_loops import Loop, Parts, alone, assert_equal, train
from tests.sinks.emits import disable_clients
from tests.support import SpyHook, at


def test_hooks_measure_against_the_given_reference(tmp_path):
    torch.save(Parts(Loop()).model.state_dict(), tmp_path / "weights.pt")
    parts = Parts(Loop())
    with parts.attach(tmp_path / "run", ["gradient_projection"], reference=tmp_path / "weights.pt") as scope:
        assert_equal(train(parts, scope), alone(Loop()))
    names = {name for _, _, _, name, _ in read_run(tmp_path / "run").points}
    assert any(name.startswith("gradient_projection/") for name in names)


def test_schedule_selects_the_steps_of_hooks(tmp_path):
    """The hook runs only at the steps of its schedule."""
    spy, parts = at(SpyHook, HookPoint.POST_STEP)(), Parts(Loop())
    with parts.attach(tmp_path, [spy], schedules={spy.name: StepSchedule(mode="stride", every_n_steps=2)}) as scope:
        train(parts, scope)
    assert [step for _, _, step in spy.seen] == [1, 3, 5]


@pytest.mark.parametrize("digests", [None, 0, 7])
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_steps_without_work_are_skipped(loop, digests):
    """Between two steps with work, no digest, SNAPSHOT or delivery is due."""
    options = AttachOptions(loop=loop, log_every=6, snapshot_every=20, digest_every=digests, length=50)

    def has_work(step: int) -> bool:
        is_snapshot = loop == "step" and options.is_due(step)
        return options.is_digest_due(step) or is_snapshot or step % options.log_every == 0

    for step in range(1, 130):
        following = options.next_work(step)
        assert following >= step
        assert not any(map(has_work, range(step, following)))
    assert options.next_work(61) == (63 if digests else 66)


def test_sinks_are_created_by_name(tmp_path):
    """The CSV and JSONL files of an attached loop contain the metrics."""
    parts = Parts(Loop())
    with parts.attach(tmp_path, ["norms"], sinks=["csv", "jsonl"]) as scope:
        train(parts, scope)
    (table,) = tmp_path.glob("*.csv")
    assert "norms/total_grad_norm" in table.read_text()
    assert list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("sink", ["wandb", "mlflow", "trackio"])
def test_services_are_selected_by_name(tmp_path, monkeypatch, sink):
    """A sink with an option needs none; clients are not started here."""
    SinkRegistry.get(sink).check_installed()
    disable_clients(monkeypatch)
    parts = Parts(Loop())
    with parts.attach(tmp_path, ["norms"], sinks=["jsonl", sink]) as scope:
        assert_equal(train(parts, scope), alone(Loop()))
    (record,) = set(tmp_path.glob("*.jsonl")) - {tmp_path / "alerts.jsonl", tmp_path / "digests.jsonl"}
    lines = record.read_text().splitlines()
    assert len(lines) == len(set(lines)) > 1


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("wandbb", r"Unknown sink 'wandbb'. Did you mean 'wandb'\? Known: console, csv, jsonl, mlflow, tensorboard, "),
        (CSVSink, "is not a sink: give an object, such as CSVSink.., or a name: console, csv, jsonl, mlflow, "),
    ],
    ids=["name", "class"],
)
def test_unknown_sink_is_refused_with_names(tmp_path, item, sentence):
    with pytest.raises(UsageError, match=sentence):
        Parts(Loop()).attach(tmp_path, [], sinks=[item])


@pytest.mark.filterwarnings("always::loopscope.errors.RunNotice")
def test_silent_run_prints_warnings_at_end(tmp_path, capsys):
    """With display set to silent, repeated warnings appear once at the end with their count."""
    spy = at(SpyHook, HookPoint.POST_EPOCH)(lambda ctx: warnings.warn("look", RunNotice, stacklevel=1))
    parts = Parts(Loop())
    with parts.attach(tmp_path, [spy], display="silent") as scope:
        train(parts, scope)
        assert capsys.readouterr().out == ""
    last, *others = reversed(capsys.readouterr().out.splitlines())
    assert last == "note: look (2 times)"
    assert len(others) <= 1  # the progress line


def test_attach_has_every_setting_with_its_default():
    """Each field of the options is an argument of attach; ``audit`` has a shorter name."""
    arguments = {name: item.default for name, item in signature(attach).parameters.items()}
    arguments["audit_hooks"] = arguments.pop("audit")
    for item in fields(AttachOptions):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        assert arguments[item.name] == default or (arguments[item.name] is None and not default), item.name


@pytest.mark.longer
def test_attached_hooks_are_profiled(tmp_path):
    parts = Parts(Loop())
    with parts.attach(tmp_path, ["norms"], profile_hooks=True, hook_offload_state=True, guardian_device="cpu") as scope:
        assert_equal(train(parts, scope), alone(Loop()))
    assert "norms" in json.loads((tmp_path / "summary.json").read_text())["hook_profile"]


def test_type_checkers_see_every_argument() -> None:
    """The arguments of the overloads are those of the function, apart from the parts that only a custom loop has."""
    only_loops = {"target", "optimizer", "scheduler", "scaler", "accelerator", "accumulate", "ranks"}
    assert AttachArguments.__annotations__.keys() == signature(attach).parameters.keys() - only_loops


def attached_hooks(tmp_path, **options):
    """Return the names of the hooks of a run of three steps."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer, out=tmp_path / "run", display="none", **options) as scope:
        for batch in scope.batches([torch.randn(6, 4)] * 3):
            scope.backward(model(batch).square().mean())
            optimizer.step()
        return set(scope.hooks)


def test_health_is_the_default_group(tmp_path):
    assert {"training_checks", "weight_updates"} <= attached_hooks(tmp_path)


def test_empty_list_attaches_no_group(tmp_path):
    assert attached_hooks(tmp_path, hooks=[]) == {"training_metrics"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"with_hooks": "healthy"}, r"Unknown group of hooks 'healthy'\. Did you mean 'health'\?"),
        ({"hooks": ["norms"], "hook_options": {"norms": {"top": "4"}}}, "top is '4'; it must be an integer"),
        ({"hooks": ["norms"], "hook_options": {"norms": {"top": 4.5}}}, r"top is 4\.5; it must be an integer"),
    ],
)
def test_wrong_options_are_named(tmp_path, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        attached_hooks(tmp_path, **options)


def test_unwritable_folder_is_refused_at_attach(tmp_path):
    (tmp_path / "file").write_text("x")
    model = nn.Linear(4, 3)
    with pytest.raises(UsageError, match="cannot be written"):
        attach(model, torch.optim.SGD(model.parameters(), 0.1), out=tmp_path / "file" / "run")


def test_evaluate_takes_a_function(tmp_path):
    with Parts(Loop()).attach(tmp_path, ["norms"]) as scope, pytest.raises(UsageError, match="given a Tensor; give"):
        scope.evaluate(torch.ones(3))
