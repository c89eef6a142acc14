"""Findings: their order, their JSON, histories, start-up facts, and diagnoses of runs in progress and afterwards."""

import copy
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import loopscope
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.cli import main
from loopscope.doctor import (
    Curve,
    Diagnosis,
    Evidence,
    Finding,
    History,
    LiveDiagnosis,
    all_detectors,
    diagnose,
    start_facts,
)
from loopscope.doctor.diagnosis import with_spacing
from loopscope.doctor.findings import ranked
from loopscope.errors import RunNotice
from loopscope.hooks import HookPoint, Series
from loopscope.report.run_reader import read_shown
from loopscope.report.sections import verdict_of
from loopscope.runs import read_history
from torch import nn


def finding(name: str, severity: str, step: int = 1, confidence: float = 0.9, stage: str = "") -> Finding:
    return Finding(name, severity, step, "why", "next", (), confidence, stage)  # type: ignore[arg-type]


def test_causes_precede_their_consequences() -> None:
    """A cause of severity warning precedes a critical consequence; remarks come last, and explain nothing."""
    cause, effect = finding("cause", "warning", stage="set-up"), finding("effect", "critical", step=5, stage="loss")
    remark, other = finding("remark", "info", stage="set-up"), finding("other", "warning", confidence=0.5, stage="")
    assert [item.id for item in ranked([remark, effect, other, cause])] == ["cause", "other", "effect", "remark"]


@pytest.mark.parametrize(("factor", "spacing"), [(8, " First seen at step 17 (measured every 8 steps)."), (1, "")])
def test_finding_names_the_spacing_of_a_budget(factor: int, spacing: str) -> None:
    """The first step of a finding is known to within the steps between two measurements, which its sentence states."""
    history = History()
    history.add(1, {"budget/thinning": {"norms": factor}})
    history.add(17, {"norms/total": Series([1, 9, 17, 25], [1.0, 1.0, 9.0, 9.0])})
    found = replace(finding("large", "warning", step=17), evidence=[Evidence("norms/total", 9.0)])
    assert with_spacing(found, history).why == f"why{spacing}"


def test_later_finding_explains_no_earlier_one() -> None:
    late, early = finding("late", "warning", step=9, stage="set-up"), finding("early", "critical", step=2, stage="loss")
    assert [item.id for item in ranked([late, early])] == ["early", "late"]


@pytest.mark.parametrize(("step", "order"), [(1, ["gradients", "updates"]), (2, ["updates", "gradients"])])
def test_updates_spoil_gradients_of_later_steps(step: int, order: list[str]) -> None:
    """Within a step the gradients come first."""
    update = finding("updates", "critical", stage="updates")
    assert [item.id for item in ranked([update, finding("gradients", "warning", step, stage="gradients")])] == order


def test_exception_reverses_the_order_of_stages() -> None:
    """The step of vanishing gradients is that of their first check."""
    rate = finding("learning-rate-too-high", "warning", stage="updates")
    gradients = finding("vanishing-gradients", "critical", stage="gradients")
    assert [item.id for item in ranked([gradients, rate])] == [rate.id, gradients.id]


def test_notebook_shows_a_diagnosis_as_text() -> None:
    diagnosis = Diagnosis([finding("cause", "warning")])
    assert repr(diagnosis) == str(diagnosis) != ""


def test_json_has_the_fields_of_a_finding() -> None:
    """The content survives JSON, and describes the same finding."""
    original = Finding("id", "warning", 3, "why", "next", (Evidence("a/b", 0.5, 0.1, "0"),), 0.8)
    content = json.loads(json.dumps(Diagnosis([original]).as_dict()))
    assert content["schema"] == 1
    assert set(content["findings"][0]) == {"id", "severity", "step", "evidence", "why", "next", "confidence"}
    assert Finding.of(content["findings"][0]).as_dict() == original.as_dict()


@pytest.mark.longer
@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=9000))
def test_long_curves_are_thinned(values: list[float]) -> None:
    """Ends are kept, steps ascend, and every kept value is that of its step."""
    curve = Curve()
    for step, value in enumerate(values, start=1):
        curve.add(step, value)
    assert len(curve) <= 4098
    assert (curve.first, curve.last) == (values[0], values[-1])
    assert all(curve.steps[1:] > curve.steps[:-1])
    assert [values[step - 1] for step in curve.steps] == curve.values.tolist()


def test_history_flattens_dicts_and_series() -> None:
    history = History()
    history.add(4, {"a/dict": {"x": 1}, "a/series": Series([1, 4], [2.0, 3.0]), "a/list": [1, 2], "a/text": "no"})
    assert {name: curve.last for name, curve in history.curves.items()} == {"a/dict/x": 1.0, "a/series": 3.0}
    assert history.curve("a/series").at(3) == 2.0
    assert math.isnan(history.last("a/list"))


def test_facts_compare_model_and_optimizer() -> None:
    """A head outside of the optimizer, a frozen layer inside, a foreign tensor, and a copied embedding are found."""
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 5, bias=False)}
    )
    model["head"].weight.data.copy_(model["embedding"].weight)
    model["body"].bias.requires_grad_(False)
    held = [*model["embedding"].parameters(), *model["body"].parameters(), nn.Parameter(torch.zeros(1))]
    facts = start_facts(model, [torch.optim.SGD(held, lr=0.1)])
    assert facts["without_optimizer"]["names"] == ["head.weight"]
    assert facts["frozen_in_optimizer"]["names"] == ["body.bias"]
    assert facts["foreign_in_optimizer"] == 1
    assert facts["untied_copies"] == [["embedding.weight", "head.weight"]]


def train(
    folder: Path, optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 12, **options: object
) -> object:
    """Train with the hooks of the group health, and return the scope."""
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(steps)]
    options = {"with_hooks": "health", "out": folder, "display": "none"} | options
    with loopscope.attach(model, optimizer, **options) as scope:  # type: ignore[arg-type]
        for inputs, targets in scope.batches(batches):
            scope.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return scope


@pytest.mark.longer
def test_live_and_recorded_diagnosis_agree(tmp_path: Path) -> None:
    """The scope, the summary and the record give the same findings."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    scope = train(tmp_path / "run", torch.optim.Adam(model[0].parameters(), lr=3.0), model)
    findings = scope.diagnose().as_dict()["findings"]  # type: ignore[attr-defined]
    assert {"learning-rate-too-high", "parameters-without-optimizer"} <= {item["id"] for item in findings}
    recorded = diagnose(read_history(tmp_path / "run")).as_dict()["findings"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())["findings"]
    assert recorded == summary == findings


@pytest.mark.longer
def test_finding_is_reported_at_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An update that replaces the weights is reported at step 1, before the end of the logging interval."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        train(tmp_path / "run", torch.optim.Adam(model.parameters(), lr=3.0), model, steps=1, display="normal")
    printed = capsys.readouterr().out
    assert "critical: learning-rate-too-high, step 1: " in printed


def learning(last: float) -> History:
    """Return the history of 60 steps of a classifier whose first update is large, and whose loss ends at ``last``."""
    history = History({"groups": [{"optimizer": "SGD", "lr": 0.1}]})
    losses = [2.5, *np.linspace(6.0, last, 54), *[last] * 5]
    history.add(60, {"training_checks/loss": Series(list(range(1, 61)), losses)})
    history.add(60, {"training_checks/update_ratio": 0.3, "training_checks/uniform_loss": math.log(10)})
    history.curves["training_checks/update_ratio"] = Curve.of_points([1, 60], [0.3, 0.01])
    return history


@pytest.mark.parametrize(("last", "severity"), [(2.4, "critical"), (1.0, "warning"), (0.01, "info")])
def test_success_lowers_findings_about_harm(last: float, severity: str) -> None:
    """A critical finding says that the training cannot succeed."""
    found = {item.id: item for item in diagnose(learning(last))}["learning-rate-too-high"]
    assert found.severity == severity
    assert ("has since fallen" in found.why) is (severity != "critical")


def shown_live(losses: list[float]) -> list[str]:
    """Return the warnings and notes of a run in progress with these losses, a large first update, and its end."""
    live = LiveDiagnosis()
    live.history.facts = {"groups": [{"optimizer": "SGD", "lr": 0.1}]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, loss in enumerate(losses, start=1):
            metrics = {"training_checks/loss": loss, "training_checks/uniform_loss": math.log(10)}
            live.emit(
                metrics | ({"training_checks/update_ratio": 0.3} if step == 1 else {}),
                0,
                HookPoint.POST_STEP,
                step=step,
            )
        live.close("completed")
    return [str(item.message) for item in caught]


def test_findings_of_the_course_wait() -> None:
    """A rise that recovers at once is not reported."""
    assert shown_live([2.5, *[6.0] * 8, *[0.05] * 100]) == []


def test_refuted_findings_are_withdrawn() -> None:
    reported, withdrawn = shown_live([2.5, *[6.0] * 60, *[0.05] * 100])
    assert reported.startswith("critical learning-rate-too-high, step 1: ")
    assert withdrawn.startswith("learning-rate-too-high is withdrawn at step ")


@pytest.mark.longer
def test_diagnosis_leaves_the_training_unchanged(tmp_path: Path) -> None:
    """Asking for a diagnosis in every step changes no weight and no byte of the record."""
    weights, records = [], []
    for asks in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        folder = tmp_path / str(asks) / "run"
        batches = [torch.randn(8, 4) for _ in range(6)]
        with loopscope.attach(model, optimizer, with_hooks="health", out=folder, display="none") as scope:
            for inputs in scope.batches(batches):
                scope.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if asks:
                    scope.diagnose()
        weights.append(model.weight.detach().clone())
        records.append((folder / "run.jsonl").read_bytes())
    assert torch.equal(*weights)
    assert records[0] == records[1]


@pytest.mark.longer
@pytest.mark.parametrize(("layer", "expected"), [(nn.Dropout(0.5), 1), (nn.Tanh(), 0)], ids=["dropout", "no modes"])
def test_evaluation_in_train_mode_is_reported(tmp_path: Path, layer: nn.Module, expected: int) -> None:
    """Only of models with layers that modes affect; the module hook that finds it is removed again."""
    model = nn.Sequential(nn.Linear(4, 3), layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate() -> dict[str, float]:
        model.train()
        return {"val_loss": model(torch.ones(2, 4)).square().mean().item()}

    with loopscope.attach(model, optimizer, with_hooks="health", out=tmp_path / "run", display="none") as scope:
        for inputs in scope.batches([torch.randn(8, 4)] * 3):
            scope.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        scope.evaluate(evaluate)
    assert not model._forward_pre_hooks
    history = read_history(tmp_path / "run")
    assert len(history.alerts_of("evaluation")) == expected
    assert [item.id for item in diagnose(history).at_least("warning")] == ["evaluation-in-train-mode"] * expected


@pytest.mark.longer
@pytest.mark.parametrize(
    ("mode", "numbers", "expected"),
    [(True, {"val_loss": 0.1}, 1), (True, {}, 0), (False, {"val_loss": 0.1}, 0)],
    ids=["train mode", "no numbers", "eval mode"],
)
def test_plain_evaluation_in_train_mode_is_reported(
    tmp_path: Path, mode: bool, numbers: dict[str, float], expected: int
) -> None:
    """Between the data and epoch_end(), if that reports numbers; no module hook is left."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    with loopscope.attach(model, optimizer, with_hooks="health", out=tmp_path / "run", display="none") as scope:
        for _ in range(2):
            for inputs in scope.batches([torch.randn(8, 4)] * 3):
                scope.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            model.train(mode)
            copy.deepcopy(model)
            with torch.no_grad():
                model(torch.ones(2, 4))
            model.train()
            scope.epoch_end(**numbers)
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before
    assert len(read_history(tmp_path / "run").alerts_of("evaluation")) == expected


@pytest.mark.longer
def test_unreadable_facts_end_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tensor that cannot be inspected gives a notice, and a run without start-up facts."""

    def broken(*arguments: object) -> dict[str, object]:
        raise NotImplementedError("no such operation for this tensor")

    monkeypatch.setattr("loopscope.runs.run.start_facts", broken)
    model = nn.Linear(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        train(tmp_path / "run", torch.optim.SGD(model.parameters(), lr=0.1), model, display="silent")
    assert "The start-up facts for the doctor could not be read: NotImplementedError" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "completed"


@pytest.mark.longer
def test_resumed_run_has_the_same_findings(tmp_path: Path) -> None:
    """Its earlier history is read from the record, and its start-up facts are those of the first start."""
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(8)]

    def part(folder: Path, steps: slice, state: dict[str, object]) -> dict[str, object]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model[0].parameters(), lr=3.0)
        if state:
            model.load_state_dict(state["model"])  # type: ignore[arg-type]
            optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
        scope = loopscope.attach(
            model, optimizer, with_hooks="health", loop="step", length=8, out=folder, display="none"
        )
        if state:
            scope.load_state_dict(state["scope"])
        for inputs, targets in scope.batches(batches[steps]):
            scope.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scope": scope.state_dict()}
        scope.close()
        return states

    part(tmp_path / "whole" / "run", slice(0, 8), {})
    part(tmp_path / "parts" / "run", slice(4, 8), part(tmp_path / "parts" / "run", slice(0, 4), {}))
    whole, parts = (json.loads((tmp_path / name / "run/summary.json").read_text()) for name in ("whole", "parts"))
    assert whole["findings"] == parts["findings"]
    assert len(parts["findings"]) >= 2


@pytest.mark.longer
@pytest.mark.parametrize(("fail_on", "status"), [("critical", 0), ("info", 0), (None, 0)])
def test_command_reports_a_clean_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fail_on: str | None, status: int
) -> None:
    model = nn.Linear(4, 3)
    train(tmp_path / "run", torch.optim.Adam(model.parameters(), lr=0.01), model)
    words = ["doctor", str(tmp_path / "run"), *(["--fail-on", fail_on] if fail_on else [])]
    assert main(words, packages=("loopscope.sinks", "loopscope.training_hooks")) == status
    assert "No problem was found." in capsys.readouterr().out


@pytest.mark.parametrize(("first", "expected"), [(1, True), (201, False)])
def test_same_batch_counts_from_the_start(first: int, expected: bool) -> None:
    """A policy that has converged generates equal batches; a loader that starts again does so at every step."""
    history = History(status="completed", hooks=("training_checks",))
    for step in range(1, 302, 50):
        values = {"same_batch_count": max(0, step - first), "loss": 1.0 / step}
        history.add(step, {f"training_checks/{name}": value for name, value in values.items()})
    assert ("same-batch-at-every-step" in {item.id for item in diagnose(history)}) is expected


def history_of(*hooks: str) -> History:
    """Return the history of a healthy run with a falling loss and these hooks."""
    history = History(status="completed", hooks=hooks)
    for step in range(1, 9):
        history.add(step, {f"{hook}/loss": 1.0 / step for hook in hooks})
    return history


NEEDED = sorted({name for detector in all_detectors() for name in detector.needs})


@pytest.mark.parametrize("absent", NEEDED)
def test_verdict_needs_every_hook(absent: str) -> None:
    """Without a hook that detectors need, the verdict is its name and what to add, and no good news."""
    assert diagnose(history_of(*NEEDED)).verdict == "No problem was found."
    diagnosis = diagnose(history_of(*(name for name in NEEDED if name != absent)))
    assert diagnosis.verdict.startswith("Not checked: ")
    assert f"no {absent}; run with the group 'health'" in diagnosis.verdict
    assert diagnosis.as_dict()["checked"] is False
    assert str(diagnosis).count(absent) == 1


@pytest.mark.parametrize("reason", ["'training_checks' needs batches; call scope.batches", "x cannot run: y"])
def test_verdict_needs_checks_that_ran(reason: str) -> None:
    history = history_of(*NEEDED)
    history.left_out = {"training_checks": reason}
    assert reason in diagnose(history).verdict
    history.left_out = {"activations": "The model has no activations"}
    assert diagnose(history).verdict == "No problem was found."
    assert "Not checked: The model has no activations." in diagnose(history).missing


def test_unchecked_run_is_never_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without hooks whose loss explodes: show, doctor, JSON, page and scope have no green verdict."""
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    with loopscope.attach(model, optimizer, hooks=[], out=tmp_path / "run", display="none") as scope:
        assert scope.diagnose().verdict == "Not checked: The training has not started."
        for batch in scope.batches([torch.ones(4, 8)] * 5):
            scope.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert scope.diagnose().verdict.startswith("Not checked: ")
    for words in (["show"], ["show", "--json"], ["doctor"], ["doctor", "--json"]):
        main([words[0], str(tmp_path / "run"), *words[1:]], packages=("loopscope.sinks", "loopscope.training_hooks"))
        shown = capsys.readouterr().out
        assert "Not checked: " in shown
        assert "No problem" not in shown
    shown_run = read_shown(tmp_path / "run", "run", 2**20)
    assert verdict_of([shown_run])[0] == verdict_of([shown_run, shown_run])[0] == "unknown"


@pytest.mark.longer
def test_command_fails_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding of the requested severity gives status 1, and a wrong severity status 2."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    train(tmp_path / "run", torch.optim.Adam(model[0].parameters(), lr=0.01), model)
    packages = ("loopscope.sinks", "loopscope.training_hooks")
    assert main(["doctor", str(tmp_path / "run"), "--fail-on", "warning"], packages=packages) == 1
    assert main(["doctor", str(tmp_path / "run"), "--fail-on", "fatal"], packages=packages) == 2
    assert main(["doctor", str(tmp_path / "missing")], packages=packages) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("optimizer", "classes", "severity"), [("SGD", 0, "warning"), ("AdamW", 10, "warning"), ("AdamW", 0, "info")]
)
def test_summed_losses_matter_by_optimizer(optimizer: str, classes: int, severity: str) -> None:
    history = History({"groups": [{"optimizer": optimizer, "lr": 1e-3}]})
    history.add(1, {"training_checks/loss_is_summed": 1, "training_checks/class_count": classes})
    found = {finding.id: finding.severity for finding in diagnose(history).findings}
    assert found["loss-summed"] == severity


@pytest.mark.parametrize(
    ("leftover", "expected"),
    [([4, 4, 4, 4, 0, 0], True), ([4], True), ([0, 0, 0, 4, 0, 0], False), ([1, 1, 1, 1, 1, 1], False)],
    ids=["zeroed once per epoch", "second step", "once", "a few parameters"],
)
def test_gradients_that_are_not_zeroed_are_found(leftover: list[int], expected: bool) -> None:
    history = History({"trainable": 4})
    for step, count in zip((2, 3, 5, 10, 51, 101), leftover, strict=False):
        history.add(step, {"training_checks/leftover_gradient_count": count})
    assert ("gradients-not-zeroed" in {finding.id for finding in diagnose(history).findings}) is expected


def test_batch_normalisations_that_never_trained_are_found() -> None:
    """Frozen layers are usual after a training, and a mistake with their initial statistics."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for is_trained, expected in ((False, True), (True, False)):
        if is_trained:
            model(torch.randn(8, 4))
        model[1].eval().requires_grad_(False)
        facts = start_facts(model, [torch.optim.SGD(model[0].parameters(), lr=0.1)])
        assert bool(facts["batchnorms_never_trained"]["count"]) is expected
        assert ("batchnorm-frozen" in {finding.id for finding in diagnose(History(facts)).findings}) is expected
        model[1].train().requires_grad_(True)


@pytest.mark.parametrize(("probability", "expected"), [(0.9, True), (0.8, False)])
def test_dropout_of_nearly_all_inputs_is_found(probability: float, expected: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(probability))
    facts = start_facts(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert ("dropout-too-strong" in {finding.id for finding in diagnose(History(facts)).findings}) is expected


def severities(history: History) -> dict[str, str]:
    return {finding.id: finding.severity for finding in diagnose(history).findings}


@pytest.mark.parametrize(
    ("names", "missing", "severity"),
    [(["out.bias"], 0, "info"), (["out.bias"], 1, "warning"), (["out.weight"], 0, "warning")],
    ids=["cancelled bias", "bias that is not used", "weight"],
)
def test_one_bias_may_have_no_effect(names: list[str], missing: int, severity: str) -> None:
    """Losses of differences have no gradient for the bias of the output."""
    history = History({"trainable": 8})
    for step in (1, 2, 3, 5):
        counts = {"without_gradient_count": missing, "never_gradient_count": len(names)}
        history.add(step, {f"training_checks/{name}": value for name, value in counts.items()})
        history.add(step, {f"training_checks/never_gradient/{name}": step for name in names})
    assert severities(history)["parameters-without-gradient"] == severity


@pytest.mark.parametrize(
    ("rates", "severity"),
    [
        ([0.1] * 85 + [0.0] * 15, None),
        ([0.1] * 60 + [0.0] * 40, "critical"),
        ([0.0] * 30 + [0.1] * 70, "warning"),
        ([0.0] * 2 + [0.1] * 98, None),
    ],
    ids=["end of a schedule", "early end", "first epoch", "start of a warm-up"],
)
def test_rate_of_zero_counts_by_its_length(rates: list[float], severity: str | None) -> None:
    history = History()
    history.add(100, {"training_metrics/lr": Series(list(range(1, 101)), rates)})
    assert severities(history).get("learning-rate-zero") == severity


@pytest.mark.parametrize(("optimizer", "expected"), [("SGD", True), ("LBFGS", False)])
def test_gradients_of_line_searches_may_jump(optimizer: str, expected: bool) -> None:
    history = History({"groups": [{"optimizer": optimizer, "lr": 0.1}]})
    norms = [1.0 if step % 20 else 1e5 for step in range(1, 101)]
    history.add(100, {"training_checks/grad_norm": Series(list(range(1, 101)), norms)})
    assert ("exploding-gradients" in severities(history)) is expected


def test_frozen_parts_may_have_untrained_statistics() -> None:
    """A backbone that is frozen completely is not expected to learn statistics."""
    backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval().requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(4, 2))
    facts = start_facts(model, [torch.optim.SGD(model[1].parameters(), lr=0.1)])
    assert not facts["batchnorms_never_trained"]["count"]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([step / 20_000 for step in range(1, 121)], True),
        ([0.0] * 60 + [0.03] * 60, True),
        ([min(step / 30, 1.0) for step in range(1, 121)], False),
        ([1 - step / 121 for step in range(120)], False),
    ],
    ids=["longer than training", "per epoch", "usual", "decay"],
)
def test_warm_ups_longer_than_training_are_found(rates: list[float], expected: bool) -> None:
    history = History({"groups": [{"optimizer": "AdamW", "lr": rates[0], "initial_lr": 1.0}]})
    history.add(120, {"training_metrics/lr": Series(list(range(1, 121)), rates)})
    assert "warm-up-too-long" not in severities(history)
    history.status = "complete"
    assert severities(history).get("warm-up-too-long") == ("info" if expected else None)
    history.planned_steps = 120
    assert severities(history).get("warm-up-too-long") == ("warning" if expected else None)
    history.planned_steps = 20_000
    assert "warm-up-too-long" not in severities(history)


@pytest.mark.parametrize(("planned", "is_found"), [(120, True), (240, False)])
def test_warm_ups_end_by_the_planned_step(planned: int, is_found: bool) -> None:
    """A warm-up that has reached a third of the rate halfway may end in time."""
    history = History({"groups": [{"optimizer": "AdamW", "lr": 0.0, "initial_lr": 1.0}]})
    history.add(120, {"training_metrics/lr": Series(list(range(1, 121)), [step / 360 for step in range(1, 121)])})
    history.status, history.planned_steps = "completed", planned
    assert ("warm-up-too-long" in severities(history)) is is_found


def test_spikes_that_have_recovered_are_remarks() -> None:
    alert = {"hook": "loss_spikes", "metric": "loss_rise", "step": 60, "value": 0.4, "limit": 0.25}
    for last, severity in ((0.5, "info"), (2.0, "warning")):
        history = History()
        losses = [1.0] * 59 + [3.0] * 20 + [last] * 40
        history.add(119, {"training_checks/loss": Series(list(range(1, 120)), losses)})
        history.alerts.append(alert | {"sentence": "The loss has not recovered.", "severity": "warning"})
        assert severities(history)["loss-spike"] == severity


@pytest.mark.parametrize(("last", "expected"), [(-1.0, False), (-0.5, True)], ids=["falls", "rises"])
def test_negative_losses_may_fall_after_jumps(last: float, expected: bool) -> None:
    """Twenty percent of a negative loss are added, not multiplied."""
    history = History({"groups": [{"optimizer": "Adam", "lr": 1e-3}]})
    steps = list(range(1, 121))
    history.add(120, {"training_checks/grad_norm": Series(steps, [1.0] * 80 + [50.0] * 40)})
    history.add(120, {"training_checks/loss": Series(steps, [-0.9] * 80 + [last] * 40)})
    assert ("gradient-jump" in severities(history)) is expected


@pytest.mark.parametrize(("length", "expected"), [(5, False), (30, True)])
def test_short_spikes_of_gradients_are_no_jumps(length: int, expected: bool) -> None:
    history = History({"groups": [{"optimizer": "RMSprop", "lr": 1e-3}]})
    steps = list(range(1, 121))
    for name, low, high in (("grad_norm", 0.3, 4.0), ("loss", 0.01, 0.2)):
        values = [low] * 80 + [high] * length + [low] * (40 - length)
        history.add(120, {f"training_checks/{name}": Series(steps, values)})
    assert ("gradient-jump" in severities(history)) is expected


def test_harmless_jumps_of_gradients_are_silent() -> None:
    """The task becomes harder at step 81, and the loss falls from there on."""
    history = History({"groups": [{"optimizer": "Adam", "lr": 1e-3}]})
    steps = list(range(1, 121))
    falling = [13.0 * 0.8**step for step in range(40)]
    history.add(120, {"training_checks/grad_norm": Series(steps, [0.2] * 80 + [4 * loss for loss in falling])})
    history.add(120, {"training_checks/loss": Series(steps, [0.003] * 80 + falling)})
    assert "gradient-jump" not in severities(history)


@pytest.mark.parametrize(("start", "expected"), [(0, False), (60, True)], ids=["cyclic", "cosine"])
def test_cyclic_rates_are_no_cosine(start: int, expected: bool) -> None:
    """A triangle that starts at its lowest rate is meant to rise again, one that starts at its peak is not."""
    history = History({"groups": [{"optimizer": "SGD", "lr": 0.1}]})
    rates = [1e-3 + 0.1 * (1 - abs((start + step) % 120 - 60) / 60) for step in range(240)]
    history.add(240, {"training_metrics/lr": Series(list(range(1, 241)), rates)})
    assert ("cosine-schedule-rises" in severities(history)) is expected


@pytest.mark.parametrize(("frozen", "severity"), [({}, "warning"), ({"body": 0.9}, "info")])
def test_high_first_loss_is_usual_in_fine_tuning(frozen: dict[str, float], severity: str) -> None:
    history = History({"frozen_modules": frozen})
    history.add(1, {"training_checks/loss": 6.6, "training_checks/class_count": 5})
    history.add(1, {"training_checks/uniform_loss": math.log(5)})
    assert severities(history)["initial-loss-high"] == severity


@pytest.mark.parametrize(
    ("found", "classes", "expected"),
    [(2, 97, True), (28, 97, False), (2, 3, False), (8, 97, False)],
    ids=["sorted", "shuffled", "few classes", "frequent classes"],
)
def test_batches_of_few_classes_are_sorted(found: int, classes: int, expected: bool) -> None:
    """A batch of 32 random rows of 97 equally frequent classes has 27 of them."""
    history = History()
    history.settings = {"batch_size": 32}
    for step in (1, 2, 3, 5):
        numbers = {"class_count": classes, "target_class_count": found, "single_class_batch_fraction": 0.0}
        history.add(step, {f"training_checks/{name}": value for name, value in numbers.items()})
    assert ("data-sorted-by-class" in severities(history)) is expected
    history.add(6, {"training_checks/padding_fraction": 0.0})
    assert "data-sorted-by-class" not in severities(history)


def test_huge_integers_are_infinite() -> None:
    history = History()
    history.add(1, {"a/number": 10**400, "a/series": Series([1], [-(10**400)])})
    assert (history.last("a/number"), history.last("a/series")) == (math.inf, -math.inf)


EXTREMES = [math.nan, math.inf, -math.inf, 0.0, -1.0, 5e-324, 1e-20, 1e20, 1e308]
EXTREME_COUNTS = [0.0, 1.0, 2.0, 2.0**40]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Return the history of a training of 70 steps with dropout and AdamW."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    folder = tmp_path_factory.mktemp("recorded") / "run"
    train(folder, torch.optim.AdamW(model.parameters(), lr=0.01), model, steps=70)
    return read_history(folder)


def with_values(recorded: History, values: dict[str, list[float]], status: str = "completed") -> History:
    """Return the history with other values of some metrics."""
    curves = {name: Curve.of_points(recorded.curves[name].steps.tolist(), new) for name, new in values.items()}
    return replace(recorded, curves={**recorded.curves, **curves}, status=status)


def holds_counts(curve: Curve) -> bool:
    return all(value == int(value) for value in curve.values)


def diagnose_without_warnings(history: History) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("error", RunNotice)  # of a detector that failed
        diagnose(history).as_dict()


@pytest.mark.parametrize("extreme", EXTREMES)
def test_detectors_accept_runs_of_extreme_values(recorded: History, extreme: float) -> None:
    """Also if all metrics but the counts have this value from the middle of the run on, or at all steps."""
    numbers = {name: curve.values.tolist() for name, curve in recorded.curves.items() if not holds_counts(curve)}
    middle = {
        name: [*values[: len(values) // 2], *[extreme] * -(-len(values) // 2)] for name, values in numbers.items()
    }
    for values in (middle, {name: [extreme] * len(values) for name, values in numbers.items()}):
        diagnose_without_warnings(with_values(recorded, values))


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data(), status=st.sampled_from(["running", "completed"]))
def test_detectors_accept_single_extreme_values(recorded: History, data: st.DataObject, status: str) -> None:
    """Extreme numbers and counts, from a step on or at a single one: no detector fails or warns."""
    names = data.draw(st.lists(st.sampled_from(sorted(recorded.curves)), min_size=1, max_size=12, unique=True))
    changed = {name: recorded.curves[name].values.tolist() for name in names}
    for name, values in changed.items():
        place, length = data.draw(st.integers(0, len(values) - 1)), data.draw(st.sampled_from([1, len(values)]))
        extremes = EXTREME_COUNTS if holds_counts(recorded.curves[name]) else EXTREMES
        values[place : place + length] = [data.draw(st.sampled_from(extremes))] * len(values[place : place + length])
    diagnose_without_warnings(with_values(recorded, changed, status))


def finished(**curves: list[float]) -> History:
    """Return the history of a finished training with metrics of ``training_checks`` from the first step on."""
    history = History({"groups": [{"optimizer": "Adam", "lr": 1e-3}]})
    for name, values in curves.items():
        history.add(len(values), {f"training_checks/{name}": Series(list(range(1, len(values) + 1)), values)})
    history.status = "complete"
    return history


def regression(values: dict[str, Any], loss: float = 1.0, steps: int = 400) -> History:
    """Return the history of a finished regression with a constant loss and other metrics at four checked steps."""
    history = History({"groups": [{"optimizer": "Adam", "lr": 1e-3}]})
    history.add(steps, {"training_checks/loss": Series(list(range(1, steps + 1)), [loss] * steps)})
    checks = [100, 250, 300, 350, 400]
    for name, value in values.items():
        listed = value if isinstance(value, list) else [value] * len(checks)
        history.add(steps, {f"training_checks/{name}": Series(checks, listed)})
    history.status = "complete"
    return history


@pytest.mark.parametrize(
    ("baseline", "expected"), [(1.02, True), (0.99, True), (1.2, False), (0.4, False), (0.1, True)]
)
def test_losses_at_the_variance_of_targets(baseline: float, expected: bool) -> None:
    """Losses far above the variance are a finding, too."""
    found = severities(regression({"term_loss": 1.0, "constant_loss": baseline}))
    assert ("no-better-than-mean" in found) is expected


@pytest.mark.parametrize(("baseline", "expected"), [(1.02, True), (0.99, True), (1.2, False), (0.4, False)])
def test_losses_at_the_entropy_of_targets(baseline: float, expected: bool) -> None:
    found = severities(
        regression({"term_loss": 1.0, "constant_loss": baseline, "uniform_loss": 3.0, "class_count": 20})
    )
    assert ("no-better-than-frequencies" in found) is expected


@pytest.mark.parametrize(("level", "expected"), [(1.0, False), (3.0, True)])
def test_restarts_may_raise_single_losses(level: float, expected: bool) -> None:
    """A cosine schedule restarts after 80 steps, and the losses, of 0.5 to 1.5 times their level, scatter."""
    rates = [1e-3 * (1 + math.cos(math.pi * (step % 80) / 80)) for step in range(160)]
    losses = [(1.0 if step < 80 else level) * (0.5 + (7 * step % 11) / 10) for step in range(160)]
    history = finished(loss=losses, lr=rates)
    history.add(160, {"training_metrics/lr": Series(list(range(1, 161)), rates)})
    assert ("learning-rate-jump" in severities(history)) is expected


def evaluated(values: list[float], *, first: float, last: float, uniform: float = 2.3) -> dict[str, str]:
    """Return the texts of findings of a training with these validation losses, whose loss falls evenly."""
    history = finished(loss=[first + (last - first) * step / 399 for step in range(400)], uniform_loss=[uniform])
    places = [80 * (place + 1) for place in range(len(values))]
    history.add(400, {"training_metrics/evaluation/val_loss": Series(places, values)})
    return {item.id: f"{item.why} {item.next}" for item in diagnose(history)}


def test_flat_validation_may_be_of_other_weights() -> None:
    """An average that hardly follows stays at chance, as does a model that does not generalise, but with less noise."""
    flat = evaluated([2.3, 2.29, 2.28, 2.28], first=2.31, last=0.04)
    assert "averaged weights" in flat["train-validation-diverging"]
    noisy = evaluated([2.31, 2.42, 2.33, 2.38], first=2.31, last=0.04)
    assert "does not generalise" in noisy["train-validation-diverging"]
    assert "averaged weights" not in noisy["train-validation-diverging"]


def test_zero_losses_are_no_other_weights() -> None:
    assert "train-validation-diverging" not in evaluated([0.0] * 4, first=0.5, last=0.0, uniform=math.nan)


def test_unlearned_data_are_not_memorised() -> None:
    """The validation loss rises, but the training loss has fallen by 2 % only."""
    found = evaluated([0.65, 0.75, 0.8, 0.9], first=0.693, last=0.677, uniform=0.693)
    assert "memorises" not in found.get("train-validation-diverging", "")


def test_chance_in_all_evaluations_is_suspicious() -> None:
    """The training loss has fallen slowly, to 95 % of that of equal probabilities."""
    found = evaluated([1.61, 1.62, 1.62, 1.63, 1.63], first=1.61, last=1.51, uniform=1.609)
    assert "Suspicious" in found["train-validation-diverging"]


@pytest.mark.parametrize(("decay", "expected"), [(0.1, False), (0.5, True)])
def test_usual_decay_explains_no_shrinking(decay: float, expected: bool) -> None:
    """AdamW with a learning rate of 0.5 shrinks the weights by 5 % in every step even with a usual decay."""
    history = History({"groups": [{"optimizer": "AdamW", "lr": 0.5, "weight_decay": decay}]})
    assert ("weight-decay-too-large" in severities(history)) is expected


def test_a_consequence_points_to_its_cause() -> None:
    """Updates that are far too large explain that the loss does not fall."""
    history = finished(loss=[3.3, 9.0, *[3.3] * 398], update_ratio=[0.9, 0.9, 0.9, 0.9, 0.9])
    found = {item.id: item for item in diagnose(history)}
    assert found["learning-rate-too-high"].next.startswith("Lower the learning rate")
    assert found["loss-not-falling"].next == "Repair learning-rate-too-high first: this is probably its consequence."


@pytest.mark.parametrize(("spread", "update", "expected"), [(0.0, 1e-3, True), (1e-2, 1e-3, False), (0.0, 0.0, False)])
def test_a_loss_that_is_one_number(spread: float, update: float, expected: bool) -> None:
    """It is a finding only if the weights change."""
    history = finished(loss=[0.7 + spread * (step % 2) for step in range(400)], update_ratio=[update] * 400)
    assert ("loss-constant" in severities(history)) is expected


def test_large_first_gradients_are_no_spikes() -> None:
    """A training that solves its task has tiny gradients soon; later gradients of that size are spikes."""
    norms = [2.0, 2.0, *[1e-3] * 398]
    assert "exploding-gradients" not in severities(finished(loss=[1.0] * 400, grad_norm=norms))
    norms[300] = norms[320] = 200.0
    assert "exploding-gradients" in severities(finished(loss=[1.0] * 400, grad_norm=norms))


@pytest.mark.parametrize(("peak", "low", "expected"), [(4.1, 2.1, True), (4.1, 1.0, False), (3.5, 2.1, False)])
def test_early_rises_without_recovery(peak: float, low: float, expected: bool) -> None:
    """With updates of a sixth of the weights, the first loss being 3.3."""
    history = finished(loss=[3.3, 3.2, peak, *[low] * 397], update_ratio=[0.01, 0.07, 0.11, 0.16, 0.16])
    assert ("learning-rate-too-high" in severities(history)) is expected


@pytest.mark.parametrize(
    ("largest", "severity"),
    [([3.0] * 5, None), ([3, 999, 3, 999, 3], "warning"), ([3, 500, 3, 3, 3], "warning")],
    ids=["usual", "code", "single row"],
)
def test_targets_far_outside_of_the_others(largest: list[float], severity: str | None) -> None:
    values = {"target_min": -2.0, "target_low": -1.2, "target_high": 1.3, "target_max": largest}
    assert severities(regression(values)).get("targets-extreme") == severity


def test_rare_large_counts_are_no_code() -> None:
    """Integers repeat their extremes now and then; that is a remark while the loss falls."""
    steps = list(range(1, 401))
    history = regression({"target_min": 0.0, "target_low": 0.0, "target_high": 1.0})
    history.add(400, {"training_checks/loss": Series(steps, [9.0 * 0.99**step for step in steps])})
    checks = list(range(10, 401, 10))
    largest = [60.0 if step in (50, 300) else 5.0 for step in checks]
    history.add(400, {"training_checks/target_max": Series(checks, largest)})
    assert severities(history).get("targets-extreme") != "warning"


@pytest.mark.parametrize(("share", "severity"), [(0.0, None), (0.01, None), (0.1, "warning"), (0.5, "critical")])
def test_targets_that_no_weights_can_give(share: float, severity: str | None) -> None:
    values = {"unreachable_target_fraction": share, "target_min": -2.0, "target_max": 2.0}
    assert severities(regression(values)).get("targets-out-of-reach") == severity


@pytest.mark.parametrize(("total", "expected"), [(1.0, False), (0.95, False), (2.6, True), (0.0, True)])
def test_targets_that_are_no_probabilities(total: float, expected: bool) -> None:
    assert ("targets-not-probabilities" in severities(regression({"soft_target_sum": total}))) is expected


@pytest.mark.parametrize(("classes", "loss"), [(0, "divergence"), (10, "cross-entropy")])
def test_finding_names_the_loss_of_such_targets(classes: int, loss: str) -> None:
    """The targets of a divergence may be logarithms, or lack them, which is repaired in another way."""
    found = diagnose(regression({"soft_target_sum": 7.0, "class_count": classes})).findings
    (reported,) = [item for item in found if item.id == "targets-not-probabilities"]
    assert reported.why.startswith(f"The {loss} gets targets")
    assert ("kl_div" in reported.next) is (loss == "divergence")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": "Adam", "weight_decay": 0.5}, True),
        ({"optimizer": "Adam", "weight_decay": 0.01}, False),
        ({"optimizer": "AdamW", "weight_decay": 0.5}, False),
        ({"optimizer": "Adam", "weight_decay": 0.5, "decoupled_weight_decay": True}, False),
    ],
)
def test_decay_that_adam_adds_to_gradients(options: dict[str, Any], expected: bool) -> None:
    history = History({"groups": [{"lr": 1e-3, **options}]})
    history.add(10, {"parameter_norms/total_weight_norm": Series([1, 10], [1.0, 1.0])})
    assert ("weight-decay-too-large" in severities(history)) is expected
