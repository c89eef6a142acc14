"""Mistakes with attach are reported in a sentence with advice; loops that only call optimizer.step()."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, HookRegistry, StepSchedule
from loopscope.integrations import Scope
from torch import nn

from tests.framework.integrations.custom_loops import Loop, Parts, alone, assert_equal, attached, train
from tests.support import ActingHook, SpyHook, at, data_for

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")  # of the health of so small a run
noted = pytest.mark.filterwarnings("always::loopscope.errors.RunNotice")
UPDATES = (HookPoint.PRE_UPDATE, HookPoint.POST_STEP)


def norms() -> Any:
    return HookRegistry.get("norms")()


def printed(capsys: Any) -> str:
    """Return the output as one line."""
    return " ".join(capsys.readouterr().out.split())


class Wrapper(torch.optim.Optimizer):
    """A wrapper that only forwards calls, without the constructor of its base class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


REFUSED: dict[str, tuple[Callable[[Parts], dict[str, Any]], str]] = {
    "a hook without a list": (lambda parts: {"hooks": 3}, "it must be a list: hooks=\\["),
    "an unknown hook": (lambda parts: {"hooks": ["norm"]}, "Did you mean 'norms'"),
    "a hook twice": (lambda parts: {"hooks": ["norms", norms()]}, "'norms' is given by name, and as .* leave one"),
    "two objects": (lambda parts: {"hooks": [norms(), norms()]}, "Two hooks are named 'norms'"),
    "idle options": (lambda parts: {"hook_options": {"hessian": {}}}, "is not enabled; add .*hooks=\\['hessian'\\]"),
    "late options": (lambda parts: {"hooks": [norms()], "hook_options": {"norms": {}}}, "pass them to its class"),
    "an unknown option": (lambda parts: {"hook_options": {"norms": {"x": 1}}}, "Unknown option of hook 'norms': 'x'"),
    "a number of ranks": (lambda parts: {"ranks": 3}, "ranks is a int; give loopscope.training.Ranks"),
    "no micro-batches": (lambda parts: {"accumulate": 0}, "accumulate is 0; .* at least 1"),
    "a number to evaluate": (lambda parts: {"evaluate": 3}, "evaluate is 3; it must be a function"),
    "a wrapper without hooks": (
        lambda parts: {"optimizer": Wrapper(parts.optimizer)},
        "Wrapper.step does not call hooks, .*; give attach the optimizer in its attribute inner .AdamW., or call super",
    ),
    "a frozen model": (
        lambda parts: {"target": nn.Linear(2, 2).requires_grad_(False)},
        "No parameter of the model .*Linear.* requires a gradient",
    ),
    "another model": (lambda parts: {"target": nn.Linear(2, 2)}, "trains no parameter of the model .*; give the model"),
    "no model": (lambda parts: {"target": parts.optimizer}, "it takes a model and its optimizer"),
    "a scheduler as scaler": (lambda parts: {"scaler": parts.scheduler}, "The scaler is a StepLR; give the loop's own"),
    "an optimizer as scheduler": (lambda parts: {"scheduler": parts.optimizer}, "The scheduler is a AdamW; give"),
    "what the Accelerator knows": (
        lambda parts: {"accelerator": parts, "accumulate": 2},
        "its own scaler and number of micro-batches",
    ),
    "a data-parallel model": (
        lambda parts: {"target": nn.DataParallel(parts.model)},
        "in one process, but attach supports one device; use",
    ),
    "no file of weights": (lambda parts: {"reference": "nowhere.pt"}, r"nowhere\.pt"),
    "an unknown sink": (lambda parts: {"sinks": ["jsonel"]}, "Did you mean 'jsonl'"),
    "a schedule of no hook": (lambda parts: {"schedules": {"norm": StepSchedule()}}, "norm"),
    "an unknown display": (lambda parts: {"display": "loud"}, "'loud'.*silent"),
    "a hook that needs more": (lambda parts: {"hooks": ["hessian"], "loss": None}, "'hessian' .*; give loss=function"),
}


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("mistake", REFUSED)
def test_invalid_attach_is_refused_at_once(tmp_path, mistake):
    """A call of attach that cannot work raises an error before the first step."""
    parts = Parts(Loop())
    change, sentence = REFUSED[mistake]
    given = {"target": parts.model, "optimizer": parts.optimizer, "hooks": ["norms"]} | change(parts)
    target, optimizer = given.pop("target"), given.pop("optimizer")
    with pytest.raises(UsageError, match=sentence):
        loopscope.attach(target, optimizer, out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_second_open_run_for_optimizer_is_refused(tmp_path):
    """After the first run is closed, the optimizer can be attached again."""
    parts = Parts(Loop())
    with parts.attach(tmp_path / "a", ["norms"]), pytest.raises(UsageError, match=r"close it first: scope\.close\(\)"):
        parts.attach(tmp_path / "b", ["norms"])
    parts.attach(tmp_path / "b", ["norms"]).close()


def test_folder_with_a_run_is_not_overwritten(tmp_path):
    """The error suggests another out= or overwrite=True, and no file changes."""
    attached(Loop(), tmp_path, ["norms"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=r"already holds a finished run.*out=, or overwrite=True"):
        attached(Loop(), tmp_path, ["norms"], overwrite=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def batch_of(parts: Parts, scope: Scope) -> Any:
    return next(scope.batches(parts.loader))


LOSSES = {
    "a tuple": (lambda loss: (loss, 1), "tuple of length 2; .* perhaps its first"),
    "detached": (lambda loss: loss.detach(), "no graph to differentiate; .* do not detach"),
    "a float": (lambda loss: loss.item(), "a float, not a tensor"),
    "many": (lambda loss: loss + torch.zeros(3), "shape \\(3,\\); .*loss.mean()"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_invalid_loss_is_refused_before_backward(tmp_path, loss):
    """Each kind of invalid loss has its own message."""
    parts = Parts(Loop())
    make, sentence = LOSSES[loss]
    with pytest.raises(UsageError, match=sentence), parts.attach(tmp_path, ["norms"]) as scope:
        scope.backward(make(parts.loss(parts.model, batch_of(parts, scope))))


CALLS: dict[str, tuple[Callable[[Parts, Scope], Any], str]] = {
    "two backward passes": (lambda parts, scope: [step(parts, scope, False), scope.backward(some_loss(parts))], "N"),
    "a word for a number": (lambda parts, scope: scope.epoch_end(val_loss="a"), "val_loss is a str; .* numbers"),
    "many numbers": (lambda parts, scope: scope.epoch_end(val_loss=torch.ones(2)), "val_loss is a Tensor"),
    "a state within a step": (
        lambda parts, scope: [batch_of(parts, scope), scope.state_dict()],
        "after optimizer.step",
    ),
    "a state of nothing": (lambda parts, scope: scope.state_dict(), "before the first step"),
    "a late state": (lambda parts, scope: [step(parts, scope), scope.load_state_dict({})], "right after attach"),
    "no state": (lambda parts, scope: scope.load_state_dict({}), "not a result of scope.state_dict\\(\\)"),
    "batches once closed": (lambda parts, scope: [scope.close(), batch_of(parts, scope)], "closed; attach a new one"),
    "backward once closed": (
        lambda parts, scope: [scope.close(), scope.backward(some_loss(parts))],
        "attach a new one",
    ),
    "an epoch once closed": (lambda parts, scope: [scope.close(), scope.epoch_end()], "attach a new one"),
    "an evaluation once closed": (lambda parts, scope: [scope.close(), scope.evaluate(int)], "attach a new one"),
}


def some_loss(parts: Parts) -> torch.Tensor:
    return parts.loss(parts.model, data_for(parts.loop.model))


def step(parts: Parts, scope: Scope, updates: bool = True, closure: Any = None) -> None:
    scope.backward(parts.loss(parts.model, batch_of(parts, scope)))
    if updates:
        parts.optimizer.step(closure)


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("mistake", CALLS)
def test_invalid_call_is_refused(tmp_path, mistake):
    """A wrong call of a scope raises an error that names the mistake."""
    parts = Parts(Loop())
    call, sentence = CALLS[mistake]
    with pytest.raises(UsageError, match=sentence), parts.attach(tmp_path, ["norms"]) as scope:
        call(parts, scope)


def loop_with(parts: Parts, scope: Scope, backward: Callable[[Any], None], updates: Callable[[int], int]) -> None:
    for index, batch in enumerate(scope.batches(parts.loader), start=1):
        backward(parts.loss(parts.model, batch))
        for _ in range(updates(index)):
            parts.optimizer.step()


TOLD: dict[str, tuple[Any, Any, str]] = {
    "accumulation": (lambda scope: scope.backward, lambda i: 1 - i % 2, "step to attach(..., accumulate=N)"),
    "short groups": (
        lambda scope: scope.backward,
        lambda i: i % 2,
        "call scope.backward(loss, last=True) for the last",
    ),
    "two updates": (lambda scope: scope.backward, lambda i: 2, "called without a pass of the model before it"),
}


@noted
@pytest.mark.parametrize("mistake", TOLD)
def test_missing_calls_are_reported(tmp_path, capsys, mistake):
    parts = Parts(Loop(accumulate=4 if mistake == "short groups" else 1))
    backward, updates, sentence = TOLD[mistake]
    with parts.attach(tmp_path, ["norms"], display="normal") as scope:
        loop_with(parts, scope, backward(scope), updates)
    assert sentence in printed(capsys)


# Programs that do not close their scope

PROGRAM = """
import loopscope, torch
from torch import nn
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scope = loopscope.attach(model, optimizer, hooks=["training_metrics"], out={out!r})
for epoch in range(2):
    for batch in scope.batches([torch.ones(3, 2)] * 4):
        scope.backward(model(batch).mean())
        optimizer.step()
        {last}
"""


def program(out: Path, last: str) -> tuple[str, dict[str, Any], int]:
    """Run a program that does not close its scope; return its output, its summary, and its recorded epochs."""
    code = [sys.executable, "-c", PROGRAM.format(out=str(out), last=last)]
    said = subprocess.run(code, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in (out / f"{out.name}.jsonl").read_text().splitlines()]
    epochs = sum(line["hook_point"] == "POST_EPOCH" for line in lines)
    return said.stdout + said.stderr, json.loads((out / "summary.json").read_text()), epochs


ENDS = {
    "forgotten": ("pass", "call scope.close()", "completed", 8, 2),
    "crashed": ("assert epoch == 0", "AssertionError", "failed", 5, 1),
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("end", [pytest.param("forgotten", marks=pytest.mark.slow), "crashed"])
def test_unclosed_run_is_complete_with_its_status(tmp_path, end):
    """A program that forgets to close or crashes leaves a summary and complete records."""
    last, sentence, status, steps, epochs = ENDS[end]
    said, summary, found = program(tmp_path / "run", last)
    assert sentence in " ".join(said.split())
    assert (summary["status"], summary["steps"], found) == (status, steps, epochs)


@noted
def test_update_observers_need_only_attach(tmp_path, capsys):
    bare, parts, seen = alone(Loop()), Parts(Loop()), []
    watch = at(SpyHook, *UPDATES)(lambda ctx: seen.append((ctx.hook_point, ctx.step)))
    with parts.attach(tmp_path, [watch, "adam_dynamics"], display="normal") as scope:
        assert_equal(bare, train(parts))
        assert scope.last_metrics()
    assert seen == [(point, step) for step in range(1, 7) for point in UPDATES]
    assert "This loop only calls optimizer.step()" not in printed(capsys)
    assert json.loads((tmp_path / "summary.json").read_text())["hooks_left_out"] == {}


@pytest.mark.some_rows(2)
@pytest.mark.compile
@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.parametrize("hooks", [["observers"], ["all"]], ids=["observers", "interventions"])
def test_hooks_leave_every_byte_of_a_compiled_model(tmp_path, how, hooks):
    bare, parts = alone(Loop(compiled=how)), Parts(Loop(compiled=how))
    with parts.attach(tmp_path, hooks) as scope:
        train(parts, scope)
    assert_equal(bare, parts)
    torch.compiler.reset()


class Memory(nn.Module):
    """A model whose loss depends on its outputs in earlier steps and on a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.past = torch.zeros(())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.past = self.past + self.head(self.body(inputs)).tanh().mean()
        return self.past


def remembered(out: Path, hooks: list[Any]) -> list[torch.Tensor]:
    """Train on a graph that is kept across steps, and return the weights; with an empty list nothing is attached."""
    torch.manual_seed(0)
    model, data = Memory(), [torch.ones(2, 4) * number for number in range(3)]
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    scope = loopscope.attach(model, optimizer, hooks=hooks, out=out, display="none") if hooks else nullcontext()
    with scope:
        backward = scope.backward if hooks else torch.Tensor.backward
        for batch in scope.batches(data) if hooks else data:
            backward(model(batch).clone(), retain_graph=True)
            optimizer.step()
    return list(model.parameters())


def test_loop_keeping_graphs_across_steps_can_be_observed(tmp_path):
    """With observers, the final weights match those without hooks."""
    pairs = zip(remembered(tmp_path, []), remembered(tmp_path, ["weight_updates", "norms"]), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def zero_weights(run_ctx: Any, model_ctx: Any) -> None:
    with torch.no_grad():
        for parameter in run_ctx.model.parameters():
            parameter.zero_()


def replace_weights(run_ctx: Any, model_ctx: Any) -> None:
    for parameter in run_ctx.model.parameters():
        parameter.data = torch.zeros_like(parameter)


@pytest.mark.parametrize("point", [HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.POST_STEP])
@pytest.mark.parametrize("act", [zero_weights, replace_weights])
def test_loop_keeping_graphs_allows_rolled_back_hooks(tmp_path, act, point):
    """A rollback restores version counters too, so that an earlier graph can still run backward."""
    pairs = zip(remembered(tmp_path, []), remembered(tmp_path, [at(ActingHook, point)(act)]), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def training_of(
    model: nn.Module, tmp_path: Path, batches: Any, trained: nn.Module | None = None, **options: Any
) -> None:
    """Train two epochs with a scope, perhaps another model than the attached one."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with loopscope.attach(model, optimizer, hooks=["norms"], out=tmp_path / "run", overwrite=True, **options) as scope:
        for _ in range(2):
            for batch in scope.batches(batches):
                scope.backward((trained or model)(batch).square().mean())
                optimizer.step()


DATA = [torch.ones(2, 3)] * 3
SILENT_MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another model": (
        lambda path: training_of(nn.Linear(3, 2), path, DATA, nn.Linear(3, 2)),
        r"No parameter of the attached model \(Linear\) has a gradient.* attach the model",
    ),
    "eval mode": (lambda path: training_of(nn.Linear(3, 2).eval(), path, DATA), "is in eval mode in a training step"),
    "an empty list": (
        lambda path: training_of(nn.Linear(3, 2), path, []),
        "got no batch: .*The scope ends without a step",
    ),
    "a used iterator": (lambda path: training_of(nn.Linear(3, 2), path, iter(DATA)), "an earlier epoch has used up"),
    "a used generator": (lambda path: training_of(nn.Linear(3, 2), path, (x for x in DATA)), "has used up"),
}


@noted
@pytest.mark.parametrize("mistake", SILENT_MISTAKES)
def test_silent_mistake_is_reported_once(tmp_path, capsys, mistake):
    """A loop that runs, but does not do what its author expects, gets one sentence."""
    run, sentence = SILENT_MISTAKES[mistake]
    with pytest.warns(loopscope.errors.RunNotice) if "list" in mistake else nullcontext() as notices:
        run(tmp_path)
    text = printed(capsys) + " ".join(str(item.message) for item in notices or ())
    assert re.search(sentence, text)
    assert text.count("got no batch") <= 1


@noted
def test_leftover_micro_batches_are_reported(tmp_path, capsys):
    """Micro-batches of an incomplete step at the end of an epoch are reported, once."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with loopscope.attach(model, optimizer, hooks=["norms"], accumulate=2, out=tmp_path / "run") as scope:
        for _ in range(2):
            for index, batch in enumerate(scope.batches(DATA)):
                scope.backward(model(batch).square().mean())
                if index == 1:
                    optimizer.step()
    assert printed(capsys).count("1 of 2 micro-batches were left over") == 1
