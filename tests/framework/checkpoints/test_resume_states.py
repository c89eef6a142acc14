"""Any sequence of training, killing, damaging, resuming and evaluating ends like the uninterrupted run."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from loopscope import sinks, training_hooks
from loopscope.checkpoints import (
    MANIFEST,
    Checkpoint,
    Checkpointing,
    checkpoint_folders,
    differing_entries,
    newest_intact,
    open_checkpoint,
)
from loopscope.checkpoints.content import restore_state
from loopscope.checkpoints.format import STATE
from loopscope.runs import Session, build_run
from loopscope.runs.run_folder import CHECKPOINTS
from loopscope.sinks import JSONLSink, read_jsonl

from tests.framework.checkpoints.crash_runs import leaves, patiently
from tests.framework.checkpoints.killed_sessions import change_file, flipped, kill
from tests.framework.runs.small_experiment import Small, SmallConfig, SmallSteps, contents, registered, session

FILLED = (sinks, training_hooks)
EPOCHS, STEPS = 4, 12
ALWAYS = ["training_metrics", "path_length", "model_smoothing", "hessian"]
SOMETIMES = {Small: "counterfactual", SmallSteps: "weight_average"}
OPTIONS: dict[str, Any] = {
    "epochs": EPOCHS,
    "hook_options": {"model_smoothing": {"update_interval": 3}},
    "log_every": 4,
    "eval_every": 2,
    "snapshot_every": 2,
}


def made(folder: Path, runner: type[Small], **options: Any) -> Session:
    """Create a session that writes only JSONL, since the columns of CSV depend on the hooks."""
    found = session(folder, runner, strategies=["plain"], **{**OPTIONS, **options})
    found.make_sinks = lambda: [JSONLSink()]
    return found


class Whole:
    """The uninterrupted run, with a checkpoint after every step."""

    def __init__(self, runner: type[Small], folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpointing, "take", patiently(Checkpointing.take))
            made(folder, runner, hooks=ALWAYS, checkpoint_every_steps=1, save_checkpoints=1, keep_checkpoints=99).run()
        run_folder = folder / runner.name / "plain"
        self.at = {
            open_checkpoint(path).step: open_checkpoint(path) for path in checkpoint_folders(run_folder / CHECKPOINTS)
        }
        self.rows = rows(run_folder)
        self.weights = (run_folder / "plain_final.pt").read_bytes()


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """Return the emits of the hooks that are always active."""
    found = []
    for record in read_jsonl(folder / "plain.jsonl"):
        metrics = {name: value for name, value in record.metrics.items() if name.split("/")[0] in ALWAYS}
        found.append((record.epoch, record.step, record.hook_point.name, repr(metrics)))
    return [row for row in found if row[3] != "{}"]


def find_checkpoint(run_folder: Path) -> Checkpoint | None:
    return newest_intact(run_folder / CHECKPOINTS, lambda sentence: None)


MANY = 60
"""Number of random examples behind the slow marker; the quick tests use the same few examples each time."""


class Lives(RuleBasedStateMachine):
    """A run in a folder of which every kill leaves a copy.

    No rule waits for a checkpoint with a precondition: which are there depends on the speed of the disk, and an
    example must be the same whenever it is repeated.
    """

    runner: type[Small]
    whole: Whole

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.lives = 0
        self.hooks = ALWAYS

    @property
    def folder(self) -> Path:
        return self.home / str(self.lives)

    @property
    def run_folder(self) -> Path:
        return self.folder / self.runner.name / "plain"

    @property
    def checkpoints(self) -> list[Path]:
        return list(checkpoint_folders(self.run_folder / CHECKPOINTS))

    @rule(steps=st.integers(1, 7), every=st.sampled_from([0, 1, 2, 3]), keep=st.integers(1, 3))
    def train_and_kill(self, steps: int, every: int, keep: int) -> None:
        """Resume from the newest intact checkpoint, and kill the run some steps later."""
        newest = find_checkpoint(self.run_folder)
        until = min(STEPS, (newest.step if newest else 0) + steps)
        options = {"checkpoint_every_steps": every, "keep_checkpoints": keep, "hooks": self.hooks, "resume": True}
        kill(made(self.folder, self.runner, **options), until, self.folder, self.home / str(self.lives + 1))
        shutil.rmtree(self.folder)
        self.lives += 1

    @rule(observed=st.booleans())
    def change_the_observers(self, observed: bool) -> None:
        self.hooks = [*ALWAYS, *[SOMETIMES[self.runner]] * observed]

    @rule(which=st.integers(0, 2), name=st.sampled_from([STATE, MANIFEST]), place=st.floats(0, 1))
    def damage(self, which: int, name: str, place: float) -> None:
        for path in self.checkpoints[which : which + 1]:
            change_file(path / name, flipped(place))

    @rule(name=st.sampled_from([STATE, MANIFEST]), rest=st.floats(0, 0.99))
    def cut_off(self, name: str, rest: float) -> None:
        for path in self.checkpoints[:1]:
            change_file(path / name, lambda data: data[: int(len(data) * rest)])

    @rule()
    def evaluate(self) -> None:
        """Evaluate the newest checkpoint again: the numbers are equal, and no file changes."""
        if (newest := find_checkpoint(self.run_folder)) is not None:
            before = contents(self.folder)
            task, state = build_run(self.runner(SmallConfig(epochs=EPOCHS)), "plain")
            restore_state(newest.content()["state"], state, newest.folder)
            if state.loop.evaluated_at == state.loop.step:
                with torch.no_grad():
                    assert task.evaluate(task.model.eval()) == state.loop.evaluation
            assert contents(self.folder) == before

    @invariant()
    def the_newest_intact_checkpoint_is_one_of_the_whole_run(self) -> None:
        if (newest := find_checkpoint(self.run_folder)) is not None:
            same = self.whole.at[newest.step]
            if same.manifest["epoch"] == newest.manifest["epoch"]:
                content, expected = newest.content(), same.content()
                assert differing_entries(expected, content) == []
                for name in ALWAYS:
                    states = [dict(leaves(held["hooks"][name], name)) for held in (content, expected)]
                    assert states[0] == states[1]

    def teardown(self) -> None:
        """Resume to the end and compare."""
        try:
            (summary,) = made(self.folder, self.runner, hooks=self.hooks, resume=True).run()
            assert (summary["status"], summary["steps"]) == ("completed", STEPS)
            assert (self.run_folder / "plain_final.pt").read_bytes() == self.whole.weights
            assert rows(self.run_folder) == self.whole.rows
        finally:
            shutil.rmtree(self.home, ignore_errors=True)


@pytest.fixture(scope="module")
def machine_of(tmp_path_factory: pytest.TempPathFactory):
    """Return the machine of an experiment."""

    def of(runner: type[Small]) -> type[Lives]:
        whole = Whole(runner, tmp_path_factory.mktemp("whole"))
        return type("Lives", (Lives,), {"runner": runner, "whole": whole})

    with registered(Small, SmallSteps):
        yield of


def check(machine: type[Lives], examples: int, length: int) -> None:
    health = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=length,
            deadline=None,
            suppress_health_check=health,
            database=None,
            derandomize=examples < MANY,
        ),
    )


@pytest.mark.slow
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("runner", [Small, SmallSteps])
def test_few_interrupted_sequences_match_uninterrupted_run(runner: type[Small], machine_of) -> None:
    """Random sequences train, kill, damage, resume and evaluate a run."""
    check(machine_of(runner), 2, 6)


@pytest.mark.slow
@pytest.mark.parametrize("runner", [Small, SmallSteps])
def test_many_interrupted_sequences_match_uninterrupted_run(runner: type[Small], machine_of) -> None:
    """The slow variant runs more and longer sequences."""
    check(machine_of(runner), MANY, 12)
