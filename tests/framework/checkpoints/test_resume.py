"""Resuming runs from their newest intact checkpoint; everything else in their folders stays unchanged."""

import errno
import os
import re
import resource
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import sinks, training_hooks
from loopscope.checkpoints import MANIFEST, Checkpointing, checkpoint_folders, newest_intact, open_checkpoint
from loopscope.checkpoints import format as checkpoint_files
from loopscope.checkpoints.format import STATE, write_checkpoint
from loopscope.checkpoints.writer import RetainedCheckpoints
from loopscope.cli import main
from loopscope.errors import HookError, LoopscopeError, RunNotice, UnsuitableError, UsageError
from loopscope.hooks import RunInfo
from loopscope.runs import Display, RunFolder
from loopscope.training_hooks import PathLength

from tests.framework.checkpoints.crash_runs import Stumbling, outcome
from tests.framework.checkpoints.killed_sessions import change_file, flipped, kill_after
from tests.framework.checkpoints.test_checkpoint_files import Exploit, written
from tests.framework.runs.small_experiment import (
    STEPS_PER_EPOCH,
    Small,
    SmallSteps,
    contents,
    read_json,
    registered,
    session,
    train,
)
from tests.support.cases import slow_unless

FILLED = (sinks, training_hooks)
HOOKS = {
    Small: ["norms", "counterfactual", "model_smoothing", "path_length"],
    SmallSteps: ["model_smoothing", "path_length", "hessian"],
}
HOOK_OPTIONS = {"model_smoothing": {"update_interval": 2}}
OPTIONS: dict[str, Any] = {
    "epochs": 3,
    "hooks": HOOKS[Small],
    "hook_options": HOOK_OPTIONS,
    "checkpoint_every_steps": 2,
}
EXPERIMENTS = [Small, SmallSteps]
TAKE = Checkpointing.take


@pytest.fixture(autouse=True, scope="module")
def entries():
    with registered(Small, SmallSteps, Stumbling):
        yield


@pytest.fixture(autouse=True, scope="module")
def patience():
    """Let every run wait for its disk, so that all write the same checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointing, "take", lambda checkpointing, wait: TAKE(checkpointing, wait=True))
        yield


def folder_of(folder: Path, runner: type[Small] = Small) -> Path:
    return folder / runner.name / "plain"


def resume(folder: Path, runner: type[Small] = Small, **options: Any) -> list[str]:
    """Resume to the end, and return the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        session(folder, runner, **{"strategies": ["plain"], **OPTIONS, **options}, resume=True).run()
    return [str(item.message) for item in said]


def steps_in(folder: Path, runner: type[Small] = Small) -> list[int]:
    return [open_checkpoint(path).step for path in checkpoint_folders(folder_of(folder, runner) / "checkpoints")]


def damage(folder: Path, step: int, name: str = STATE, place: float = 0.5) -> Path:
    path = folder_of(folder) / f"checkpoints/step_{step:09d}"
    change_file(path / name, flipped(place))
    return path


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Return the folder of a run that was killed in its seventh step, with checkpoints of steps 2, 4 and 6."""
    assert kill_after(7, tmp_path / "first", tmp_path / "killed", **OPTIONS)
    shutil.rmtree(tmp_path / "first")
    return tmp_path / "killed"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Small], Path]:
    """Return the folders of uninterrupted runs."""
    folders = {runner: tmp_path_factory.mktemp("whole") for runner in EXPERIMENTS}
    for runner, folder in folders.items():
        session(folder, runner, strategies=["plain"], **{**OPTIONS, "hooks": HOOKS[runner]}).run()
    return folders


def assert_the_same(folder: Path, whole: Path) -> None:
    assert outcome(folder).differing_entries(outcome(whole)) == []


# Resuming


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=slow_unless(step in (2, 5, 9))) for step in (1, 2, 3, 5, 6, 9)]
)
@pytest.mark.parametrize("runner", EXPERIMENTS)
def test_resumed_run_matches_uninterrupted_run(runner, step: int, whole, tmp_path: Path) -> None:
    """A run killed after any step leaves the same files as a run without interruption."""
    options = {**OPTIONS, "hooks": HOOKS[runner]}
    assert kill_after(step, tmp_path / "first", tmp_path / "killed", runner, **options)
    resume(tmp_path / "killed", runner, hooks=HOOKS[runner])
    assert_the_same(tmp_path / "killed", whole[runner])


@pytest.mark.longer
def test_resume_does_not_warn_about_scheduler_order(whole, tmp_path: Path) -> None:
    """The only messages of a resume at the end of an epoch are about the lock and an option of a hook."""
    options = {**OPTIONS, "checkpoint_every_steps": STEPS_PER_EPOCH}
    assert kill_after(STEPS_PER_EPOCH + 1, tmp_path / "first", tmp_path / "killed", **options)
    assert steps_in(tmp_path / "killed") == [STEPS_PER_EPOCH]
    lock, option = resume(tmp_path / "killed")
    assert lock.startswith("The lock on")
    assert option.startswith("counterfactual.k is 3, ")
    assert_the_same(tmp_path / "killed", whole[Small])


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("named", [False, True])
def test_overwritten_weights_remain_the_reference_after_resume(named: bool, tmp_path: Path) -> None:
    """A run that overwrites its reference weights keeps a copy, and a new run without a reference removes it."""
    options = {**OPTIONS, "hooks": ["parameter_delta", "gradient_projection"], "hook_options": {}, "overwrite": True}
    given = lambda folder: {"reference": tmp_path / folder} if named else {}
    for folder in ("whole", "run"):
        session(tmp_path / folder, strategies=["plain"], epochs=3, hooks=["norms"]).run()
    session(tmp_path / "whole", strategies=["plain"], **options, **given("whole")).run()
    assert kill_after(5, tmp_path / "run", tmp_path / "killed", **options, **given("run"))
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "killed").rename(tmp_path / "run")
    resume(tmp_path / "run", **{**options, "overwrite": False}, **given("run"))
    assert_the_same(tmp_path / "run", tmp_path / "whole")
    folder = folder_of(tmp_path / "whole")
    assert "gradient_projection/" in (folder / "plain.jsonl").read_text()
    assert read_json(folder / "experiment_config.json")["run"]["reference"] == str(folder / "plain_reference.pt")
    session(tmp_path / "whole", strategies=["plain"], epochs=3, hooks=["norms"], overwrite=True).run()
    assert not (folder / "plain_reference.pt").exists()


@pytest.mark.longer
def test_finished_strategy_is_left_unchanged_without_warnings(tmp_path: Path) -> None:
    """Resuming trains the strategies that remain."""
    session(tmp_path, strategies=["plain"]).run()
    before = contents(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session(tmp_path, strategies=["plain", "other-order"], resume=True).run()
    assert {name: data for name, data in contents(tmp_path).items() if name in before} == before
    assert read_json(tmp_path / "small/other-order/summary.json")["status"] == "completed"


@pytest.mark.longer
def test_resume_without_checkpoint_restarts_with_a_warning(tmp_path: Path, whole) -> None:
    """The restarted run matches the uninterrupted run."""
    options = {**OPTIONS, "checkpoint_every_steps": 0}
    assert kill_after(4, tmp_path / "first", tmp_path / "killed", **options)
    assert any("has no intact checkpoint: the run restarts" in said for said in resume(tmp_path / "killed"))
    assert_the_same(tmp_path / "killed", whole[Small])


@pytest.mark.longer
@pytest.mark.guarantee("resumed-runs-are-identical")
def test_failed_hook_stays_disabled_after_resume(tmp_path: Path) -> None:
    """The rows it wrote before the failure and its error record stay in the run."""
    options = {**OPTIONS, "hooks": ["stumbling", "norms"], "hook_options": {"stumbling": {"at": 5}}}
    options["on_hook_error"] = "skip"
    with pytest.warns(UserWarning, match=r"stumbled \[.*\]\. The run continues without this hook"):
        session(tmp_path / "whole", strategies=["plain"], **options).run()
    with pytest.warns(UserWarning, match="stumbled"):
        assert kill_after(7, tmp_path / "first", tmp_path / "killed", **options)
    resume(tmp_path / "killed", **options)
    assert_the_same(tmp_path / "killed", tmp_path / "whole")
    errors = read_json(folder_of(tmp_path / "killed") / "summary.json")["hook_errors"]
    assert [(error["hook"], error["step"]) for error in errors] == [("stumbling", 5)]


@pytest.mark.longer
def test_hook_left_out_late_stays_out(tmp_path: Path) -> None:
    """After a resume, the reason is still in hooks_left_out."""

    class Late(Stumbling):
        """Raises UnsuitableError late."""

        name = "late"

        def compute(self, ctx: Any) -> dict[str, float]:
            if ctx.step == 5:
                raise UnsuitableError("Hook 'late' needs more.")
            return super().compute(ctx)

    class Watched(Small):
        """Has the hook in its default group, so that it may be left out."""

        name = "watched"
        minimal_hooks = ("training_metrics", "norms", "late")
        default_group = "minimal"

    options = {"epochs": 3, "checkpoint_every_steps": 2, "hooks": [], "hook_options": {}}
    with registered(Late):
        session(tmp_path / "whole", Watched, strategies=["plain"], **options).run()
        assert kill_after(7, tmp_path / "first", tmp_path / "killed", Watched, **options)
        resume(tmp_path / "killed", Watched, **options)
    assert_the_same(tmp_path / "killed", tmp_path / "whole")
    assert "late" in read_json(folder_of(tmp_path / "killed", Watched) / "summary.json")["hooks_left_out"]


@pytest.mark.longer
def test_changed_observers_are_reported_and_run_is_unchanged(killed: Path, whole) -> None:
    """Resuming with other observers warns, and the final weights are those of the uninterrupted run."""
    (folder_of(killed) / "plain.csv").unlink()  # its columns depend on the hooks
    said = resume(killed, hooks=["norms", "model_smoothing", "weight_tracking"], sinks=False)
    assert any("These hooks differ from those" in sentence and "path_length" in sentence for sentence in said)
    weights = [folder_of(folder) / "plain_final.pt" for folder in (killed, whole[Small])]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.longer
def test_new_pre_epoch_hook_starts_at_next_epoch(tmp_path: Path) -> None:
    """A hook that needs the state before the epoch is added by a resume within an epoch."""
    options = {**OPTIONS, "hooks": ["norms"], "hook_options": {}}
    session(tmp_path / "whole", strategies=["plain"], **options).run()
    assert kill_after(6, tmp_path / "first", tmp_path / "killed", **options)
    assert steps_in(tmp_path / "killed")[0] == 4 > STEPS_PER_EPOCH
    (folder_of(tmp_path / "killed") / "plain.csv").unlink()  # its columns depend on the hooks
    said = resume(tmp_path / "killed", hooks=["norms", "counterfactual"], hook_options={}, sinks=False)
    assert (
        "Hook 'counterfactual' has needs_pre_epoch_state, but epoch 1 started without that state; its first epoch is 2."
        in said
    )
    assert read_json(folder_of(tmp_path / "killed") / "summary.json")["hook_samples"].keys() == {"counterfactual"}
    weights = [folder_of(tmp_path / folder) / "plain_final.pt" for folder in ("killed", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.longer
def test_first_pass_of_a_hook_is_counted_once(tmp_path: Path) -> None:
    """The counts of passes match those of the uninterrupted run if a hook takes a pass at its start."""

    class Passing(Stumbling):
        """Takes a pass when it starts."""

        name = "passing"

        def start(self, run: RunInfo) -> None:
            assert run.first_pass is not None
            run.first_pass()

    with registered(Passing):
        options = {**OPTIONS, "hooks": ["passing", "counterfactual"], "hook_options": {}}
        session(tmp_path / "whole", strategies=["plain"], **options).run()
        assert kill_after(7, tmp_path / "first", tmp_path / "killed", **options)
        resume(tmp_path / "killed", **options)
    assert_the_same(tmp_path / "killed", tmp_path / "whole")
    assert read_json(folder_of(tmp_path / "killed") / "summary.json")["hook_samples"]["passing"]["forward"] > 0


@pytest.mark.longer
def test_changed_environment_is_reported(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning names the setting with its old and new value."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    (told,) = [sentence for sentence in resume(killed) if "environment has changed" in sentence]
    assert f"may differ in the last bits: threads: {threads} before, 99 now" in told


# Damage


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize(
    ("name", "place"), [(STATE, 0.02), (STATE, 0.5), (STATE, 0.999), (MANIFEST, 0.1), (MANIFEST, 0.6)]
)
def test_newest_intact_checkpoint_is_used(name, place, killed: Path, whole) -> None:
    """Damaged checkpoints are named in a warning, and the resumed run matches the uninterrupted one."""
    newest = steps_in(killed)[0]
    path = damage(killed, newest, name, place)
    said = resume(killed)
    assert any(str(path / name) in sentence and "damaged" in sentence for sentence in said)
    assert_the_same(killed, whole[Small])


@pytest.mark.longer
@pytest.mark.guarantee("damage-is-detected")
def test_damaged_newer_checkpoint_evicts_no_intact_one(killed: Path, tmp_path: Path) -> None:
    """With keep_checkpoints=1, the intact checkpoint of step 5 is kept in addition to the damaged one of step 6."""
    damage(killed, 6)
    options = {**OPTIONS, "checkpoint_every_steps": 1, "keep_checkpoints": 1, "resume": True}
    with pytest.warns(RunNotice, match="step_000000006.*damaged"):
        assert kill_after(6, killed, tmp_path / "again", **options)
    told: list[str] = []
    found = newest_intact(folder_of(tmp_path / "again") / "checkpoints", told.append)
    assert found is not None
    assert (found.step, len(told)) == (5, 1)


def test_newer_checkpoint_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    """When a checkpoint of step 5 is added, only that of step 4 is due for removal, not that of step 6."""
    older, _ = written(tmp_path, 4), written(tmp_path, 6)
    assert RetainedCheckpoints.of(tmp_path, 1).add(written(tmp_path, 5)) == [older.folder]


@pytest.mark.longer
def test_checkpoint_of_newer_format_is_named_and_kept(killed: Path, whole, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume falls back to an older checkpoint and matches the uninterrupted run."""
    newest = folder_of(killed) / f"checkpoints/step_{steps_in(killed)[0]:09d}"
    content, manifest = open_checkpoint(newest).content(), dict(open_checkpoint(newest).manifest)
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint_files, "FORMAT", checkpoint_files.FORMAT + 1)
        write_checkpoint(newest, content, manifest)
    assert any("written by a newer loopscope" in sentence for sentence in resume(killed))
    assert_the_same(killed, whole[Small])


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("where", ["state", "hooks"])
def test_crafted_checkpoint_executes_no_code(where: str, killed: Path, tmp_path: Path, whole) -> None:
    """A checkpoint with an exploit and a valid manifest is refused."""
    newest = folder_of(killed) / f"checkpoints/step_{steps_in(killed)[0]:09d}"
    found = open_checkpoint(newest)
    content = {**found.content(), where: Exploit(tmp_path / "executed")}
    write_checkpoint(newest, content, found.manifest)
    with pytest.raises(UsageError, match="cannot be loaded without executing code"):
        resume(killed)
    assert not (tmp_path / "executed").exists()


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize(("name", "place"), [("plain.csv", 0.0), ("plain.csv", None), ("plain.jsonl", None)])
def test_foreign_sink_files_are_refused(name, place, killed: Path) -> None:
    """A truncated or changed file of a sink raises, with advice to restore it or to use --overwrite."""
    path = folder_of(killed) / name
    if place is None:
        path.write_bytes(path.read_bytes()[:20])
    else:
        change_file(path, flipped(place))
    with pytest.raises(UsageError, match="restore that file, or restart the run with overwrite=True"):
        resume(killed)


# Refusals


def command(folder: Path, *words: str, hooks: list[str] = HOOKS[Small]) -> list[str]:
    smoothing = ["--hook-config", "model_smoothing.update_interval=2"] * ("model_smoothing" in hooks)
    given = ["run", "small", "--strategy", "plain", "--epochs", "3", "--hooks", *hooks, *smoothing, "--hook-csv"]
    options = ["--hook-jsonl", "--checkpoint-every-steps", "2", "--output-dir", str(folder), "--no-console-output"]
    return [*given, *options, *words]


class Mistaken(Small):
    """The small experiment, with a mistake in its loss that can be switched on."""

    name = "mistaken"
    is_wrong = False

    def compute_loss(self, model: Any, batch: Any) -> Any:
        if self.is_wrong:
            torch.nn.functional.mse_loss(torch.zeros(2), torch.zeros(2), reduction="nothing")
        return super().compute_loss(model, batch)


class MistakenHook(PathLength):
    """A hook with a mistake that can be switched on."""

    name = "mistaken_hook"

    def compute(self, ctx: Any) -> Any:
        if Mistaken.is_wrong:
            raise KeyError("mine")
        return super().compute(ctx)


@pytest.mark.longer
@pytest.mark.guarantee("mistakes-are-refused-early")
def test_user_error_during_resume_keeps_its_traceback(tmp_path: Path, monkeypatch: Any) -> None:
    """An error in the loss or in a hook is raised unchanged, not reported as a bad checkpoint."""
    with registered(Mistaken, MistakenHook):
        options = {**OPTIONS, "hooks": ["mistaken_hook"], "hook_options": {}}
        assert kill_after(4, tmp_path / "first", tmp_path / "killed", Mistaken, **options)
        monkeypatch.setattr(Mistaken, "is_wrong", True)
        with pytest.raises(ValueError, match="nothing is not a valid value for reduction") as caught:
            resume(tmp_path / "killed", Mistaken, **options)
        assert "the first step after" in caught.value.__notes__[0]
        monkeypatch.setattr(Mistaken, "compute_loss", Small.compute_loss)
        with pytest.raises(HookError, match=r"Hook 'mistaken_hook' raised at .*KeyError: 'mine'"):
            resume(tmp_path / "killed", Mistaken, **options)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("one-writer-per-run")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--resume", "--lr", "0.5"], "lr was 0.01 and is 0.5"),
        (["--resume", "--seed", "3", "--bright"], "seed was 0 and is 3, bright was False and is True"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        ([], "already holds an unfinished run"),
    ],
)
def test_checkpoint_of_another_run_is_refused(words, told, killed: Path, capfd) -> None:
    """Changed options or a missing --resume exit with status 2 and one line, and no file changes."""
    before = contents(killed)
    assert main(command(killed, *words)) == 2
    output, errors = capfd.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert told in errors
    assert contents(killed) == before


@pytest.mark.longer
def test_a_run_with_another_treatment_is_refused(killed: Path, capfd) -> None:
    before = contents(killed)
    assert main(command(killed, "--resume", hooks=["norms"])) == 2
    assert "was trained with other committing hooks: model_smoothing; now: none" in capfd.readouterr().err
    assert contents(killed) == before


@pytest.mark.longer
def test_checkpoint_of_another_experiment_is_refused(killed: Path, capfd) -> None:
    """The folder of one experiment is moved to the place of another; no file changes."""
    shutil.move(killed / "small", killed / "small_steps")
    before = contents(killed)
    words = ["small_steps" if word == "small" else word for word in command(killed, "--resume")]
    assert main(words) == 2
    assert "experiment was 'small' and is 'small_steps'" in capfd.readouterr().err
    assert contents(killed) == before


@pytest.mark.longer
def test_checkpoint_of_another_model_names_differing_tensors(killed: Path, monkeypatch, capfd) -> None:
    """The command exits with status 2, and no file changes."""
    wider = Small.build_model
    monkeypatch.setattr(Small, "build_model", lambda self: wider(self)[:-1].append(torch.nn.Linear(8, 3)))
    lock = folder_of(killed) / "run.lock"
    lock.unlink()
    before = contents(killed)
    assert main(command(killed, "--resume")) == 2
    assert "was written for another model: its parameters differ (4.bias, 4.weight)" in capfd.readouterr().err
    assert contents(killed) == before


@pytest.mark.longer
def test_hook_rejecting_its_saved_state_is_named(killed: Path, monkeypatch, capfd) -> None:
    """The command exits with status 2 if load_state_dict of a hook raises."""

    def refuse(hook: Any, state: Any) -> None:
        raise KeyError("window")

    monkeypatch.setattr(PathLength, "load_state_dict", refuse)
    assert main(command(killed, "--resume")) == 2
    assert "The state of hook 'path_length' cannot be restored (KeyError: 'window' [" in capfd.readouterr().err


@pytest.mark.longer
def test_resume_needs_only_the_run_folder(tmp_path: Path, whole, capfd) -> None:
    """A moved folder resumes to the result of the uninterrupted run, and any other folder is refused."""
    first = tmp_path / "first"
    assert main(command(first)) == 0
    folder = folder_of(first)
    for name in ("summary.json", "plain_final.pt"):
        (folder / name).unlink()
    shutil.move(first, tmp_path / "moved")
    assert main(["resume", str(folder_of(tmp_path / "moved"))]) == 0
    assert_the_same(tmp_path / "moved", whole[Small])
    assert main(["resume", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capfd.readouterr().err


# A file system that fails


def failing(number: int, function: Any) -> Any:
    """Return a function of ``os`` that refuses every path and file below a folder of checkpoints."""

    def called(place: Any, *arguments: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place)
        if "/checkpoints/" in path:
            raise OSError(number, os.strerror(number))
        return function(place, *arguments, **options)

    return called


FAULTS = {
    "no space": (errno.ENOSPC, ("fsync",)),
    "a broken disk": (errno.EIO, ("fsync",)),
    "a read-only folder": (errno.EROFS, ("mkdir", "rename", "unlink", "rmdir")),
    "a rename that fails": (errno.EACCES, ("rename",)),
}


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize("fault", FAULTS)
def test_training_continues_if_checkpoints_cannot_be_written(fault, killed, whole) -> None:
    """The failure is reported, older checkpoints stay, and the other files match the uninterrupted run."""
    before, (number, functions) = steps_in(killed), FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        for function in functions:
            patch.setattr(os, function, failing(number, getattr(os, function)))
        said = resume(killed)
    assert any(f"could not be written: {os.strerror(number)}. Training continues." in sentence for sentence in said)
    assert steps_in(killed) == before
    differing_names = outcome(killed).differing_entries(outcome(whole[Small]))
    assert [name for name in differing_names if "/checkpoints/" not in name] == []


@pytest.mark.longer
def test_full_disk_costs_only_that_checkpoint(killed, whole) -> None:
    """A disk that fills up in the middle of a write is reported once, and later checkpoints are written."""
    write, sizes = checkpoint_files._DigestingFile.write, []

    def full(file: Any, data: Any) -> int:
        sizes.append(len(data))
        if sum(sizes[:-1]) < 5_000 <= sum(sizes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files._DigestingFile, "write", full)
        said = resume(killed)
    assert sum("could not be written: No space left on device." in sentence for sentence in said) == 1
    assert steps_in(killed) == [6, 4, 2]
    assert [
        name for name in outcome(killed).differing_entries(outcome(whole[Small])) if "/checkpoints/" not in name
    ] == []


@pytest.mark.longer
def test_file_size_limit_costs_only_the_checkpoint(tmp_path: Path) -> None:
    """The run completes and leaves no partial checkpoint."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        with pytest.warns(UserWarning, match="could not be written: File too large"):
            session(tmp_path, strategies=["plain"], save_checkpoints=2, hooks=["path_length"], sinks=False).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_json(folder_of(tmp_path) / "summary.json")["status"] == "completed"
    assert list((folder_of(tmp_path) / "checkpoints").iterdir()) == []


@pytest.mark.longer
def test_slow_disk_skips_checkpoints_without_blocking(tmp_path, monkeypatch) -> None:
    """Checkpoints are skipped with a notice, and training ends while the disk still writes the first one."""
    monkeypatch.setattr(Checkpointing, "take", TAKE)
    write, trained = checkpoint_files._DigestingFile.write, threading.Event()
    waits, evaluations = list[bool](), list[Any]()

    def slow(file: Any, data: Any) -> int:
        if not waits:
            waits.append(False)
            waits[0] = trained.wait(60)
        return write(file, data)

    def should_stop(runner: Any, evaluation: Any) -> bool:
        evaluations.append(evaluation)
        if len(evaluations) == STEPS_PER_EPOCH:
            trained.set()
        return False

    monkeypatch.setattr(checkpoint_files._DigestingFile, "write", slow)
    monkeypatch.setattr(SmallSteps, "should_stop", should_stop)
    with pytest.warns(RunNotice, match="is skipped because the previous one is still being written"):
        session(tmp_path, SmallSteps, strategies=["plain"], checkpoint_every_steps=1, epochs=1).run()
    assert waits == [True]
    assert steps_in(tmp_path, SmallSteps)


class Preconditioner:
    """An object that a checkpoint cannot store."""

    factor = 0.5


class Preconditioned(torch.optim.SGD):
    """SGD that creates an object in its state in the first step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight].setdefault("preconditioner", Preconditioner())
        return super().step(closure)


class SmallPreconditioned(Small):
    """The small experiment with such an optimizer."""

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return Preconditioned(model.parameters(), 0.1)


@pytest.mark.guarantee("resumed-runs-are-identical")
def test_checkpoint_of_unknown_objects_is_skipped(tmp_path: Path) -> None:
    """A notice names the object of the optimizer's state, the run completes, and no checkpoint is left."""
    with pytest.warns(RunNotice, match=r"checkpoint of step 2 is skipped\. .*[Pp]reconditioner"):
        session(tmp_path, SmallPreconditioned, strategies=["plain"], checkpoint_every_steps=2, hooks=["hessian"]).run()
    assert read_json(folder_of(tmp_path) / "summary.json")["status"] == "completed"
    assert steps_in(tmp_path) == []


@pytest.mark.longer
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize("saved", [0, 1])
def test_full_disk_at_the_end_explains_recovery(saved: int, tmp_path: Path) -> None:
    """The error advises to resume from the last checkpoint, or to overwrite without one."""

    def full(file: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        write = RunFolder.write_weights

        def write_weights(folder: Any, model: Any) -> None:
            patch.setattr(os, "fsync", full)  # from here on, for the summary too
            write(folder, model)

        patch.setattr(RunFolder, "write_weights", write_weights)
        with pytest.raises(LoopscopeError, match="the final weights were not written") as error:
            train(tmp_path, epochs=1, save_checkpoints=saved)
    advice = "start the same program with resume=True" if saved else "Restart the run with overwrite=True"
    assert re.search(advice, str(error.value))
    if saved:
        assert train(tmp_path, epochs=1, save_checkpoints=1, resume=True)["status"] == "completed"


@pytest.mark.guarantee("damage-is-detected")
def test_removed_record_is_reported_and_rewritten(tmp_path: Path) -> None:
    """The config file is written again, and a sink whose file was removed is disabled with a warning."""

    class Removing(Display):
        def strategy_started(self, run: Any, *rest: Any) -> Any:
            (run.output_dir / "experiment_config.json").unlink()
            (run.output_dir / "plain.csv").unlink()
            return super().strategy_started(run, *rest)

    removing = session(tmp_path, epochs=1, strategies=["plain"], save_checkpoints=1)
    removing.display = Removing()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        removing.run()
    texts = [str(warning.message) for warning in said]
    assert any("experiment_config.json was removed during the run; it is written again" in text for text in texts)
    assert any("Sink 'csv' failed and is disabled" in text and "was removed or replaced" in text for text in texts)
    assert (tmp_path / "small/plain/experiment_config.json").is_file()


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("at", [2, 3])
def test_removed_checkpoint_is_reported_and_later_ones_written(at: int, tmp_path: Path) -> None:
    """The removal of a checkpoint while the run writes is a warning, and the run completes."""
    folder = tmp_path / "small/plain"
    evaluate = Small.evaluate

    def removing(runner: Any, model: Any) -> Any:
        found = [*checkpoint_folders(folder / "checkpoints")]
        if len(found) == at - 1 and found[-1].name == "step_000000003":
            shutil.rmtree(found[-1])
        return evaluate(runner, model)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(Small, "evaluate", removing)
        train(tmp_path, epochs=3, save_checkpoints=1)
    texts = [str(warning.message) for warning in said]
    assert any("step_000000003 was removed during the run" in text for text in texts), texts
    assert (folder / "plain_final.pt").is_file()
    assert next(checkpoint_folders(folder / "checkpoints")).name == "step_000000009"


@pytest.mark.longer
@pytest.mark.guarantee("resumed-runs-are-identical")
def test_the_last_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    """The checkpoint of the last step is written even if its predecessor is still being written."""
    write = checkpoint_files.write_checkpoint

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RunNotice)
        patch.setattr("loopscope.checkpoints.writer.write_checkpoint", slow)
        train(tmp_path, epochs=3, checkpoint_every_steps=1)
    assert next(checkpoint_folders(tmp_path / "small/plain/checkpoints")).name == "step_000000009"
