"""Ends of a run (completed, raising hook, damaged state, Ctrl-C), and the files that remain."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import training_hooks
from loopscope.checkpoints import load_checkpoint
from loopscope.cli import main
from loopscope.engine import HookManager
from loopscope.errors import HookError, LoopscopeError, StateMutationError
from loopscope.hooks import HookPoint, InterventionHook, StatePart, TrainingHook
from loopscope.loops import epoch_loop, step_loop
from loopscope.runs import RunOptions, Session, build_run
from loopscope.sinks import read_jsonl

from tests.framework.runs.small_experiment import Small, SmallConfig, SmallSteps, read_json, registered, session, train

assert training_hooks.__all__
EXPERIMENTS = [Small, SmallSteps]
POINTS = [HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.POST_STEP, HookPoint.SNAPSHOT]
AT_STEP = 5
CALLS: list[tuple[str, str]] = []


class Culprit(TrainingHook):
    """Acts once, late in the run; subclasses define the action."""

    name = "caller"
    hook_points = frozenset(HookPoint)

    def act(self, ctx: Any) -> None:
        raise ZeroDivisionError("as\n told")

    def compute(self, ctx: Any) -> dict[str, float]:
        CALLS.append(("compute", ctx.hook_point.name))
        if ctx.step >= AT_STEP:
            self.act(ctx)
        return {"x": 1.0}

    def check(self, values: Any, step: int) -> None:
        CALLS.append(("check", str(step)))

    def state_dict(self) -> dict[str, Any]:
        CALLS.append(("state_dict", ""))
        return {"calls": len(CALLS)}

    def end(self, status: str) -> None:
        CALLS.append(("end", status))

    def describe_metrics(self) -> list[Any]:
        return []


class MisbehavingHook(Culprit):
    """Writes into the parameters."""

    name = "misbehaving_hook"

    def act(self, ctx: Any) -> None:
        next(ctx.model.parameters()).add_(1.0)


class Interrupted(Culprit):
    """Raises SIGINT, as Ctrl-C does."""

    name = "interrupted"

    def act(self, ctx: Any) -> None:
        signal.raise_signal(signal.SIGINT)


class Doubler(InterventionHook):
    """Doubles every gradient, as declared."""

    name = "doubler"
    hook_points = {HookPoint.POST_BACKWARD}
    commits = {StatePart.GRADIENTS}

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, float]:
        model_ctx.scale_gradients(2.0)
        return {}

    def describe_metrics(self) -> list[Any]:
        return []


@pytest.fixture(autouse=True)
def culprits():
    CALLS.clear()
    with registered(Culprit, MisbehavingHook, Interrupted, Doubler, Small, SmallSteps):
        yield


def at(base: type[Culprit], *points: HookPoint, **members: Any) -> type[Culprit]:
    return type("Culprit", (base,), {"name": f"at_{base.name}", "hook_points": set(points), **members})


def run(folder: Path, runner: type[Small], hook: str, **options: Any) -> Path:
    """Run one strategy with a hook and return its folder."""
    session(folder, runner, strategies=["plain"], hooks=["norms", hook], **options).run()
    return folder / runner.name / "plain"


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("runner", EXPERIMENTS)
def test_raising_hook_ends_run_with_checkpoint(runner, point, tmp_path: Path) -> None:
    """The summary is failed with the error, and the checkpoint excludes the state of that hook."""
    hook = at(Culprit, point)
    with registered(hook), pytest.raises(HookError, match=rf"'at_caller' raised at {point.name} of step \d: ZeroDiv"):
        run(tmp_path, runner, hook.name)
    folder = tmp_path / runner.name / "plain"
    summary = read_json(folder / "summary.json")
    assert summary["status"] == "failed"
    assert summary["error"].startswith("HookError: Hook 'at_caller' raised at")
    (error,) = summary["hook_errors"]
    assert (error["hook"], error["point"]) == ("at_caller", point.name)
    assert error["step"] + (point is HookPoint.PRE_EPOCH) == summary["steps"]  # the step is finished first
    _, state = build_run(runner(SmallConfig()), "plain")
    hooks = load_checkpoint(folder / f"checkpoints/step_{summary['steps']:09d}", state)
    assert set(hooks) == {"training_metrics", "norms"}
    assert state.loop.step == summary["steps"]
    assert not (folder / "plain_final.pt").exists()


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("runner", EXPERIMENTS)
def test_skipping_a_hook_keeps_final_weights(runner, point, tmp_path: Path) -> None:
    """The run completes with the bytes of the bare run, and the summary lists the hook error."""
    bare = train(tmp_path / "bare", runner=runner)
    hook = at(Culprit, point)
    with registered(hook), pytest.warns(UserWarning, match="The run continues without this hook"):
        folder = run(tmp_path, runner, hook.name, on_hook_error="skip")
    summary = read_json(folder / "summary.json")
    assert (summary["status"], summary["error"]) == ("completed", None)
    assert [error["hook"] for error in summary["hook_errors"]] == [hook.name]
    weights = f"{runner.name}/plain/plain_final.pt"
    assert (tmp_path / weights).read_bytes() == (tmp_path / "bare" / weights).read_bytes()
    assert summary["final"] == bare["final"]


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("runner", EXPERIMENTS)
def test_damaged_state_is_never_checkpointed(runner, on_error, tmp_path: Path) -> None:
    """A mutation is fatal, and the error names the last intact checkpoint."""
    hook = at(MisbehavingHook, HookPoint.POST_STEP)
    every = 1 if runner is Small else 3
    with registered(hook), pytest.raises(StateMutationError, match=r"'at_misbehaving_hook'.*parameters") as fatal:
        run(tmp_path, runner, hook.name, on_hook_error=on_error, save_checkpoints=every)
    folder = tmp_path / runner.name / "plain"
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert checkpoint.name == "step_000000003"
    assert str(fatal.value).endswith(f"The last intact checkpoint is {checkpoint}.")
    summary = read_json(folder / "summary.json")
    assert (summary["status"], summary["steps"]) == ("failed", AT_STEP)
    assert summary["error"].startswith("StateMutationError: ")
    assert not (folder / "plain_final.pt").exists()


@pytest.mark.longer
@pytest.mark.parametrize("runner", EXPERIMENTS)
def test_no_hook_runs_on_damaged_state(runner, tmp_path: Path) -> None:
    """After the mutation no hook is called, and the sinks contain all steps up to it."""
    hook = at(MisbehavingHook, HookPoint.POST_STEP)
    with registered(hook, Culprit), pytest.raises(StateMutationError, match="No checkpoint was written"):
        run(tmp_path, runner, hook.name)
    assert CALLS[-1] == ("compute", "POST_STEP")
    records = list(read_jsonl(tmp_path / runner.name / "plain/plain.jsonl"))
    steps = [step for record in records for step in record.metrics.get("at_misbehaving_hook/x", Steps()).steps]
    assert steps == list(range(1, AT_STEP + 1))


def test_evaluation_that_changes_weights_is_undone(tmp_path: Path) -> None:
    """The run completes with the weights of a run whose evaluation only reads."""

    class Careless(Small):
        name = "careless"

        def evaluate(self, model: Any) -> dict[str, float]:
            next(model.parameters()).mul_(0.5)
            return {"val_acc": 0.0}

    for experiment in (Small, Careless):
        session(tmp_path, experiment, strategies=["plain"], hooks=["norms"]).run()
    assert read_json(tmp_path / "careless/plain/summary.json")["status"] == "completed"
    weights = [torch.load(tmp_path / f"{name}/plain/plain_final.pt") for name in ("small", "careless")]
    torch.testing.assert_close(*weights, rtol=0, atol=0, equal_nan=True)


def test_mutating_evaluation_is_fatal(tmp_path: Path) -> None:
    """No hook runs after the evaluation, no checkpoint is written, and the summary is failed."""

    class Careless(Small):
        name = "careless"

        def build_optimizer(self, model: Any) -> Any:
            optimizers.append(super().build_optimizer(model))
            return optimizers[0]

        def evaluate(self, model: Any) -> dict[str, float]:
            if [event for event, _ in CALLS if event != "state_dict"]:
                for state in optimizers[0].state.values():
                    state["exp_avg"].mul_(0.5)
            return {"val_acc": 0.0}

    optimizers: list[Any] = []
    with pytest.raises(StateMutationError, match="The 'evaluation' at the loop of step 3 may only read"):
        session(tmp_path, Careless, strategies=["plain"], hooks=["caller"], save_checkpoints=1).run()
    asked = [event for event, _ in CALLS if event in ("end", "state_dict")]
    assert asked == ["state_dict"], "once, at the start, where what no checkpoint holds is refused"
    assert not (tmp_path / "careless/plain/checkpoints").exists()
    assert read_json(tmp_path / "careless/plain/summary.json")["status"] == "failed"


class Steps:
    """Stands for a metric that is missing from a record."""

    steps: list[int] = []


def test_mutation_at_end_leaves_no_final_weights(tmp_path: Path) -> None:
    """A hook that changes parameters in end() fails the run."""

    def end(self: Any, status: str) -> None:
        self.act(self)

    models: list[Any] = []
    hook = at(
        MisbehavingHook, HookPoint.PRE_EPOCH, end=end, act=lambda self, ctx: next(models[0].parameters()).add_(1.0)
    )
    hook.start = lambda self, run: models.append(run.model)
    with registered(hook), pytest.raises(StateMutationError, match=r"'at_misbehaving_hook' at end"):
        run(tmp_path, Small, hook.name, epochs=1)
    folder = tmp_path / "small/plain"
    assert read_json(folder / "summary.json")["status"] == "failed"
    assert not (folder / "plain_final.pt").exists()


def test_raising_end_fails_the_run(tmp_path: Path) -> None:
    """The other hooks still end, and a checkpoint is written."""

    def end(self: Any, status: str) -> None:
        raise ZeroDivisionError("at last")

    hook = at(Culprit, HookPoint.PRE_EPOCH, end=end)
    with registered(hook), pytest.raises(HookError, match="at end of step 3: ZeroDivisionError: at last"):
        session(tmp_path, strategies=["plain"], hooks=[hook.name, "caller"], epochs=1).run()
    summary = read_json(tmp_path / "small/plain/summary.json")
    assert (summary["status"], summary["hook_errors"][0]["point"]) == ("failed", "end")
    assert CALLS.count(("end", "completed")) == 1
    assert (tmp_path / "small/plain/checkpoints/step_000000003").exists()


def test_unsavable_hook_state_is_excluded(tmp_path: Path) -> None:
    """The error names the hook, and the checkpoint has the states of the other hooks."""
    asked: list[int] = []

    def state_dict(self: Any) -> dict[str, Any]:
        asked.append(1)
        if len(asked) > 1:  # the first call is the check for unstorable values at the start
            raise ZeroDivisionError("no state")
        return {}

    hook = at(Culprit, HookPoint.PRE_EPOCH, state_dict=state_dict)
    with registered(hook), pytest.raises(HookError, match="'at_caller' raised at state_dict of step 3"):
        run(tmp_path, Small, hook.name, save_checkpoints=1)
    _, state = build_run(Small(SmallConfig()), "plain")
    path = tmp_path / "small/plain/checkpoints/step_000000003"
    assert set(load_checkpoint(path, state)) == {"training_metrics", "norms"}


@pytest.fixture
def ctrl_c_interrupts():
    """Let SIGINT raise as in a terminal, since a background process ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.usefixtures("ctrl_c_interrupts")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("runner", EXPERIMENTS)
def test_interrupt_closes_sinks_and_writes_summary(runner, point, tmp_path: Path, capfd) -> None:
    """Ctrl-C gives exit status 130, a summary with status interrupted and a complete record."""
    hook = at(Interrupted, point)
    words = ["run", runner.name, "--strategy", "plain", "--hooks", "norms", hook.name, "--hook-jsonl"]
    with registered(hook):
        status = main([*words, "--snapshot-every", "1", "--output-dir", str(tmp_path), "--no-console-output"])
    output, errors = capfd.readouterr()
    assert (status, output, errors) == (130, "", "loopscope: Stopped by SIGINT.\n")
    folder = tmp_path / runner.name / "plain"
    summary = read_json(folder / "summary.json")
    assert (summary["status"], summary["error"]) == ("interrupted", "StoppedError: Stopped by SIGINT.")
    assert summary["steps"] in (AT_STEP, AT_STEP + 1)
    assert CALLS[-1] == ("end", "interrupted")
    assert all(json.loads(line) for line in (folder / "plain.jsonl").read_text().splitlines())


def test_experiment_bug_propagates_with_summary(tmp_path: Path) -> None:
    """The exception is raised, and the summary has the error with the source line."""

    class Broken(Small):
        name = "broken"

        def compute_loss(self, model: Any, batch: Any) -> Any:
            raise ArithmeticError("no loss today")

    with pytest.raises(ArithmeticError, match="no loss today"):
        session(tmp_path, Broken, strategies=["plain"]).run()
    summary = read_json(tmp_path / "broken/plain/summary.json")
    assert summary["status"] == "failed"
    assert summary["error"].startswith("ArithmeticError: no loss today [")
    assert 'in compute_loss: raise ArithmeticError("no loss today")]' in summary["error"]


@pytest.mark.longer
@pytest.mark.parametrize(("hook", "status"), [("caller", 1), ("misbehaving_hook", 1)])
def test_command_reports_failed_run_in_one_line(hook: str, status: int, tmp_path: Path, capfd) -> None:
    """Raising and mutating hooks give exit status 1 and one line on stderr."""
    words = ["run", "small", "--strategy", "plain", "--hooks", hook, "--output-dir", str(tmp_path)]
    assert main([*words, "--no-console-output"]) == status
    output, errors = capfd.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith(f"loopscope: Hook '{hook}'")


@pytest.mark.longer
def test_unwritable_checkpoint_causes_warning(tmp_path: Path) -> None:
    """The run completes without the checkpoint."""

    class Squatter(Culprit):
        """Creates a file at the path of the checkpoints' folder."""

        name = "squatter"
        hook_points = {HookPoint.PRE_EPOCH}

        def compute(self, ctx: Any) -> dict[str, float]:
            (tmp_path / "small/plain/checkpoints").write_text("")
            return {}

    with registered(Squatter), pytest.warns(UserWarning, match=r"step_00000000[36] could not be written: .* continues"):
        run(tmp_path, Small, "squatter", save_checkpoints=1)
    assert read_json(tmp_path / "small/plain/summary.json")["status"] == "completed"


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("runner", EXPERIMENTS)
@pytest.mark.parametrize("hooks", [[], ["norms", "hessian", "doubler"]])
def test_checkpoint_interval_changes_no_weights(runner, hooks, tmp_path: Path) -> None:
    """The final weights have the same bytes with any interval and without checkpoints."""
    results = []
    for every in (0, 1, 2):
        folder = tmp_path / str(every)
        session(folder, runner, strategies=["plain"], hooks=hooks, save_checkpoints=every, sinks=False).run()
        results.append((folder / runner.name / "plain/plain_final.pt").read_bytes())
        steps = {0: [], 1: [3, 6], 2: [6]} if runner is Small else {0: [], 1: [1, 2, 3, 4, 5, 6], 2: [2, 4, 6]}
        found = sorted((folder / runner.name / "plain").glob("checkpoints/*"))
        expected = [f"step_{step:09d}" for step in steps[every]]
        assert {path.name for path in found} <= set(expected)  # some are skipped on a slow disk
        assert bool(found) == bool(expected)
    assert results[0] == results[1] == results[2]


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("runner", EXPERIMENTS)
def test_resumed_session_matches_final_weights(runner: type[Small], tmp_path: Path) -> None:
    """Continuing from a checkpoint of a session gives the final weights of the session."""
    every = 1 if runner is Small else 3
    train(tmp_path, runner=runner, save_checkpoints=every, hooks=["hessian", "norms"])
    folder = tmp_path / runner.name / "plain"
    task, state = build_run(runner(SmallConfig()), "plain")
    load_checkpoint(folder / "checkpoints/step_000000003", state)
    (epoch_loop if runner is Small else step_loop)(task, HookManager([], task, state, loop=runner.loop))
    for name, value in torch.load(folder / "plain_final.pt", weights_only=True).items():
        assert torch.equal(state.model.state_dict()[name], value)


@pytest.mark.longer
def test_evaluation_interval_changes_no_weights(tmp_path: Path) -> None:
    weights = []
    for every in (1, 3, 7):
        train(tmp_path / str(every), epochs=7, eval_every=every, sinks=False)
        weights.append(torch.load(tmp_path / f"{every}/small/plain/plain_final.pt", weights_only=True))
    for other in weights[1:]:
        assert all(torch.equal(other[name], value) for name, value in weights[0].items())


class Quitting(Small):
    """Exits the program within a step."""

    def compute_loss(self, model: Any, batch: Any) -> Any:
        if model.training and len(CALLS) > 0:
            raise SystemExit(0)
        CALLS.append(("loss", ""))
        return super().compute_loss(model, batch)


def test_exiting_experiment_is_a_failed_run(tmp_path):
    """An experiment that calls sys.exit() raises an error with the step and leaves a failed summary."""
    CALLS.clear()
    runner = Quitting(SmallConfig(output_dir=tmp_path))
    with pytest.raises(LoopscopeError, match=r"called sys\.exit\(0\) at step 2"):
        Session(runner, RunOptions(strategies=["plain"])).run()
    assert read_json(tmp_path / "small" / "plain" / "summary.json")["status"] == "failed"
