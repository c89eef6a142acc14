"""``loopscope verify``: a second run is compared with the checkpoints of the first, bit for bit."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from loopscope import sinks, training_hooks
from loopscope.checkpoints import DIGESTS, run_lock
from loopscope.cli import main
from loopscope.errors import LoopscopeError, UsageError
from loopscope.runs.validation import DivergedError

from tests.framework.checkpoints.killed_sessions import change_file
from tests.framework.checkpoints.test_comparing import PLANTED, plant
from tests.framework.runs.small_experiment import Small, SmallSteps, contents, session

FILLED = (sinks, training_hooks)
EXPERIMENTS = [Small, SmallSteps]
OPTIONS: dict[str, Any] = {
    "strategies": ["plain"],
    "epochs": 2,
    "checkpoint_every_steps": 2,
    "keep_checkpoints": 9,
    "digest_every": 0,
}

pytestmark = pytest.mark.usefixtures("patient_small")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    for runner in EXPERIMENTS:
        session(folder, runner, **OPTIONS, hooks=["path_length"]).run()
    return folder


def validate(folder: Path, runner: type[Small] = Small, **options: Any) -> dict[str, Any]:
    return dict(session(folder, runner, **{**OPTIONS, **options}).validate())


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("runs-can-be-verified")
@pytest.mark.parametrize("runner", EXPERIMENTS)
@pytest.mark.parametrize("hooks", [[], ["path_length"], ["norms", "hessian", "weight_average"]])
def test_run_with_any_observers_equals_every_checkpoint(runner, hooks, finished: Path) -> None:
    """A run that is trained again with any observers equals every checkpoint, tensor by tensor."""
    if runner is SmallSteps:
        hooks = [hook for hook in hooks if hook != "norms"]
    before = contents(finished)
    assert validate(finished, runner, hooks=hooks) == {"plain": [2, 4, 6]}
    assert contents(finished) == before


@pytest.mark.guarantee("runs-can-be-verified")
@pytest.mark.parametrize("change", PLANTED)
def test_planted_difference_is_named_with_hooks(change, finished, tmp_path) -> None:
    """The error names the step, the tensor and the hooks of both runs."""
    shutil.copytree(finished, tmp_path / "first")
    plant(tmp_path / "first/small/plain", 4, change)
    difference = rf"diverges from .* at step 4 \(epoch 1\), first in {PLANTED[change]}\."
    hooks = r" Its hooks: training_metrics, variance; those of the first run: path_length, training_metrics"
    with pytest.raises(DivergedError, match=difference + hooks):
        validate(tmp_path / "first", hooks=["variance"], hook_options={"variance": {"window": 3}})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Train a run with the command, and return its folder."""
    words = ["run", "small", "--strategy", "plain", "--epochs", "3", "--save-checkpoints", "--keep-checkpoints", "9"]
    assert main([*words, "--hooks", "norms", "--no-console-output", "--output-dir", str(tmp_path)]) == 0
    return tmp_path / "small/plain"


@pytest.mark.longer
@pytest.mark.guarantee("runs-can-be-verified")
def test_verify_names_equal_steps_or_difference(run: Path, capfd) -> None:
    """The command prints one line and changes no file, or exits with status 1 and names the first difference."""
    before = contents(run)
    for hooks in ([], ["--hooks", "path_length"]):
        assert main(["verify", str(run), *hooks]) == 0
        assert capfd.readouterr() == ("plain: identical bit for bit at 3 steps: 3, 6, 9\n", "")
        assert contents(run) == before
    plant(run, 6, next(iter(PLANTED)))
    assert main(["verify", str(run)]) == 1
    assert "at step 6 (epoch 2), first in parameters/0.weight" in capfd.readouterr().err


@pytest.mark.longer
def test_verify_compares_random_intervals(run: Path, capfd) -> None:
    """With --intervals, only the steps between two checkpoints are trained, from the earlier one."""
    before = contents(run)
    assert main(["verify", str(run), "--intervals", "9"]) == 0
    lines = [f"plain, steps {first} to {first + 2}: identical bit for bit" for first in (1, 4, 7)]
    assert capfd.readouterr().out.splitlines() == lines
    assert contents(run) == before
    plant(run, 6, next(iter(PLANTED)))
    assert main(["verify", str(run), "--intervals", "9"]) == 1
    assert "at step 6 (epoch 2), first in parameters" in capfd.readouterr().err


@pytest.mark.longer
def test_verify_checks_every_run_of_folder(tmp_path: Path, capfd) -> None:
    """The folder of an experiment has all strategies and seeds, each trained with its committing hooks."""
    words = ["run", "small", "--strategy", "plain", "clipped", "--seed", "3", "4", "--epochs", "1"]
    assert main([*words, "--no-console-output", "--output-dir", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path / "small")]) == 0
    names = [f"{strategy} seed-{seed}" for strategy in ("clipped", "plain") for seed in (3, 4)]
    assert capfd.readouterr().out.splitlines() == [f"{name}: identical bit for bit at 1 step: 3" for name in names]


@pytest.mark.longer
def test_verify_reports_what_it_cannot_compare(run: Path, tmp_path: Path, capfd) -> None:
    for words, sentence in (
        ([], "loopscope verify takes the folder of a run: loopscope verify RUN."),
        ([str(run), "--intervals", "0"], "--intervals is 0; it must be at least 1."),
        ([str(tmp_path / "none")], "none does not exist; verify takes the folder of a run"),
    ):
        assert main(["verify", *words]) == 2
        assert sentence in capfd.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert main(["verify", str(run), "--intervals", "1"]) == 2
    assert "has no intact checkpoint to start from; omit --intervals" in capfd.readouterr().err
    with run_lock(run):
        assert main(["verify", str(run)]) == 2
    assert f"{run} is still being trained; wait until it has ended." in capfd.readouterr().err


@pytest.mark.parametrize("options", [{"lr": 0.5}, {"seed": 4}, {"hooks": ["grad_clip"]}])
def test_another_run_is_refused(options, finished: Path) -> None:
    with pytest.raises(UsageError, match=r"belongs to another run|was trained with other committing hooks"):
        validate(finished, **options)


def test_a_run_without_checkpoints_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no intact checkpoints or digests to compare with"):
        validate(tmp_path)
    shutil.copytree(finished, tmp_path / "first")
    shutil.rmtree(tmp_path / "first/small/plain/checkpoints")
    with pytest.raises(UsageError, match="has no intact checkpoints or digests to compare with"):
        validate(tmp_path / "first")


@pytest.mark.longer
def test_digests_validate_run_without_checkpoints(tmp_path) -> None:
    """The digests of snapshots are sufficient in both loops, also after an early stop."""
    for runner, options, expected in (
        (Small, {"epochs": 5, "snapshot_every": 2}, [6, 12, 15]),
        (Small, {"epochs": 9, "snapshot_every": 4, "eval_every": 3}, [9]),
        (SmallSteps, {"epochs": 3, "snapshot_every": 4}, [4, 8, 9]),
    ):
        given = {"strategies": ["plain"], **options}
        kind = Stopping if "eval_every" in options else runner
        folder = tmp_path / f"{expected}"
        session(folder, kind, **given).run()
        assert (folder / runner.name / "plain" / DIGESTS).read_text().count("\n") == len(expected)
        again = session(folder, kind, **given, hooks=["path_length"])
        assert again.validate() == {"plain": expected}


class Stopping(Small):
    """Stops at its first evaluation."""

    def should_stop(self, evaluation: Mapping[str, float]) -> bool:
        return True


def test_a_damaged_checkpoint_is_named(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "first")
    change_file(tmp_path / "first/small/plain/checkpoints/step_000000004/state.pt", lambda data: data[:-5])
    with pytest.raises(LoopscopeError, match=r"step_000000004.* it is damaged"):
        validate(tmp_path / "first")
