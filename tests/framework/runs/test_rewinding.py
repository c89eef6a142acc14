"""``loopscope rewind``: a stretch trained again equals the run, with any hooks, and leaves its files unchanged."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from loopscope import sinks, training_hooks
from loopscope.checkpoints import DIGESTS, read_digests
from loopscope.cli import main
from loopscope.errors import UsageError
from loopscope.runs import StepRange
from loopscope.runs.validation import DivergedError

from tests.framework.checkpoints.killed_sessions import kill_after
from tests.framework.checkpoints.test_comparing import PLANTED, plant
from tests.framework.runs.small_experiment import STEPS_PER_EPOCH, Small, SmallSteps, contents, session

FILLED = (sinks, training_hooks)
EVERY = {"checkpoint_every_steps": 2, "save_checkpoints": 1, "keep_checkpoints": 20}
OPTIONS: dict[str, Any] = {"strategies": ["plain"], "epochs": 4, **EVERY}
KEPT = {Small: [2, 3, 4, 6, 8, 9, 10, 12], SmallSteps: [*range(1, 13)]}
MANY = ["norms", "hessian", "variance", "path_length", "counterfactual", "weight_average", "lr_probe", "consecutive"]
WINDOW = {"variance": {"window": 2, "every": 2}}

pytestmark = pytest.mark.usefixtures("patient_small")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train runs without hooks, and runs with many hooks from the start."""
    folder = tmp_path_factory.mktemp("runs")
    for runner, amp in ((Small, "none"), (SmallSteps, "bf16")):
        own = {**OPTIONS, "amp": amp, "accumulation_steps": 2 if runner is SmallSteps else 1}
        session(folder / "bare", runner, **own).run()
        session(folder / "with hooks", runner, **own, hooks=hooks_of(runner), hook_options=WINDOW).run()
    return folder


def hooks_of(runner: type[Small]) -> list[str]:
    return [hook for hook in MANY if runner is Small or hook not in ("norms", "counterfactual")]


def last_step(runner: type[Small], until: int) -> int:
    """Return the last trained step, which in the epoch loop is the end of an epoch."""
    return until if runner is SmallSteps else -(-until // STEPS_PER_EPOCH) * STEPS_PER_EPOCH


def rewind(
    folder: Path, stretch: StepRange, runner: type[Small] = Small, **options: Any
) -> tuple[Path, int, list[int]]:
    if runner is SmallSteps:
        options = {"amp": "bf16", "accumulation_steps": 2} | options
    path, since, compared = session(folder, runner, **{**OPTIONS, **options}).rewind(stretch)
    return path, since, list(compared)


def points(folder: Path) -> dict[tuple[str, str, int], Any]:
    """Return every number of a record by metric, hook point and step."""
    found: dict[tuple[str, str, int], Any] = {}
    (path,) = [path for path in folder.glob("*.jsonl") if path.name not in ("alerts.jsonl", DIGESTS)]
    for line in map(json.loads, path.read_text().splitlines()):
        del line["epoch"]
        where = line.pop("hook_point"), line.pop("step")
        for name, value in line.items():
            is_series = isinstance(value, dict) and value.keys() == {"steps", "values"}
            each = zip(value["steps"], value["values"], strict=True) if is_series else [(where[1], value)]
            found |= {(name, where[0], step): one for step, one in each}
    return found


def assert_the_same(found: Path, expected: Path, first: int, last: int) -> None:
    """Compare the numbers of these steps to those of a complete run, except for numbers of its final weights."""
    ours, wanted = points(found), points(expected)
    of_stretch = {key: value for key, value in wanted.items() if first <= key[2] <= last}
    assert of_stretch
    assert {key: ours.get(key) for key in of_stretch} == of_stretch
    assert not [key for key in ours.keys() - wanted.keys() if not re.search("solution|^gradient_projection", key[0])]


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("runs-can-be-verified")
@pytest.mark.parametrize("runner", [Small, SmallSteps])
@pytest.mark.parametrize(
    "step",
    [
        1,
        pytest.param(5, marks=pytest.mark.slow),
        pytest.param(8, marks=pytest.mark.slow),
        pytest.param(12, marks=pytest.mark.slow),
    ],
)
def test_rewound_hooks_measure_like_original_hooks(runner, step, finished):
    """A rewind from the start gives the metrics of a run with these hooks and leaves the old run unchanged."""
    before = contents(finished / "bare")
    options = {"hooks": hooks_of(runner), "hook_options": WINDOW}
    path, since, compared = rewind(
        finished / "bare", StepRange(step, min(step + 1, 12), from_start=True), runner, **options
    )
    assert since == 0
    assert compared == [each for each in KEPT[runner] if each <= last_step(runner, min(step + 1, 12))]
    assert_the_same(path, finished / "with hooks" / runner.name / "plain", 1, step + 1)
    shutil.rmtree(path.parent)
    assert contents(finished / "bare") == before


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("runs-can-be-verified")
@pytest.mark.parametrize(("step", "since"), [(1, 0), (2, 0), (3, 2), (4, 3), (12, 10)])
def test_rewind_starts_at_nearest_earlier_checkpoint(step, since, finished, tmp_path):
    """Hooks of the original run resume from that checkpoint."""
    runs = shutil.copytree(finished / "with hooks", tmp_path / "runs")
    options = {"hooks": MANY, "hook_options": WINDOW}
    path, began, compared = rewind(runs, StepRange(step, min(step + 1, 12)), **options)
    assert began == since
    assert compared == [each for each in KEPT[Small] if since < each <= last_step(Small, step + 1)]
    assert_the_same(path, runs / "small/plain", since + 1, step + 1)


@pytest.mark.longer
def test_new_hooks_start_between_two_epochs(finished, tmp_path):
    runs = shutil.copytree(finished / "bare", tmp_path / "runs")
    path, began, _ = rewind(runs, StepRange(8, 9), hooks=["counterfactual", "norms"])
    assert began == 6
    ours, expected = (
        {key: value for key, value in points(folder).items() if key[0].startswith(("counterfactual", "norms"))}
        for folder in (path, finished / "with hooks/small/plain")
    )
    assert {key[2] for key in ours} == {9}
    assert {key: value for key, value in ours.items() if "solution" not in key[0]}.items() <= expected.items()


@pytest.mark.longer
@pytest.mark.guarantee("runs-can-be-verified")
def test_rewind_reports_first_divergent_tensor(finished, tmp_path):
    """The error and the failed summary name the step and the tensor."""
    runs = shutil.copytree(finished / "bare", tmp_path / "runs")
    plant(runs / "small/plain", 4, next(iter(PLANTED)))
    with pytest.raises(DivergedError, match=r"diverges from .* at step 4 \(epoch 1\), first in parameters"):
        rewind(runs, StepRange(3, 5))
    summary = json.loads((runs / "small/plain/rewinds/steps_3_to_5/summary.json").read_text())
    assert summary["status"] == "failed"
    assert "at step 4 (epoch 1), first in parameters" in summary["error"]


def test_impossible_rewind_is_refused(finished, tmp_path):
    for change, sentence in (
        ({"hooks": ["grad_clip"]}, "was trained with other committing hooks: none; now: grad_clip"),
        ({"lr": 0.5}, "belongs to another run: lr was 0.01 and is 0.5"),
    ):
        with pytest.raises(UsageError, match=sentence):
            rewind(finished / "bare", StepRange(3, 3), **change)
    with pytest.raises(UsageError, match=r"--step is 40, but the last step of the run in .* is 12\."):
        rewind(finished / "bare", StepRange(40, 41))
    assert not (finished / "bare/small/plain/rewinds").exists()
    with pytest.raises(UsageError, match="contains no run"):
        rewind(tmp_path, StepRange(3, 3))
    with pytest.raises(UsageError, match=r"step is 0; steps are counted from 1"):
        StepRange(0, 3)
    with pytest.raises(UsageError, match="until is 2, before step=3"):
        StepRange(3, 2)


@pytest.mark.longer
def test_rewind_command_keeps_committing_hooks(tmp_path, capfd):
    """The command accepts further hooks and requires a step or --spike."""
    words = ["run", "small", "--strategy", "plain", "--epochs", "3", "--save-checkpoints"]
    words += ["--keep-checkpoints", "9", "--hooks", "grad_clip", "--grad_clip.max_norm", "0.1", "--no-console-output"]
    assert main([*words, "--output-dir", str(tmp_path)]) == 0
    run = tmp_path / "small/plain"
    assert main(["rewind", str(run), "--step", "7", "--hooks", "norms", "variance", "--variance.window", "2"]) == 0
    out = capfd.readouterr().out
    assert "Repeated the run from step 6" in out
    record = json.loads((run / "rewinds/steps_7_to_7/experiment_config.json").read_text())
    assert record["hooks"]["grad_clip"]["max_norm"] == 0.1
    assert record["hooks"]["variance"]["window"] == 2
    assert main(["rewind", str(run), "--step", "7"]) == 0
    assert main(["rewind", str(run)]) == 2
    assert "loopscope rewind needs one of --step N and --spike" in capfd.readouterr().err


def test_rewind_of_no_run_is_refused(tmp_path):
    assert main(["rewind", str(tmp_path / "none"), "--step", "3"]) == 2


DIGESTED = {**OPTIONS, "digest_every": 2, "save_checkpoints": 0, "checkpoint_every_steps": 0}


@pytest.mark.slow
def test_digests_show_equality_or_first_divergence(tmp_path, capfd):
    """diff, rewind and validation work without checkpoints, and reading stops where the digest chain breaks."""
    for name, options in (
        ("a", {}),
        ("b", {"hooks": ["variance", "norms"], "hook_options": WINDOW}),
        ("c", {"seed": 3}),
    ):
        session(tmp_path / name, **{**DIGESTED, **options}).run()
    runs = [str(tmp_path / name / "small/plain") for name in "abc"]
    main(["diff", *runs[:2]])
    assert "Digests of 6 steps: identical.\nMetrics" in capfd.readouterr().out
    assert main(["diff", runs[0], runs[2]]) == 1
    assert "at step 2 (epoch 0), first in parameters/0.weight" in capfd.readouterr().err
    _, since, compared = rewind(tmp_path / "a", StepRange(7, 8), hooks=["variance"], hook_options=WINDOW)
    assert (since, compared) == (0, [2, 4, 6, 8])
    assert session(tmp_path / "a", **DIGESTED).validate() == {"plain": [2, 4, 6, 8, 10, 12]}
    lines = (tmp_path / "a/small/plain" / DIGESTS).read_text().splitlines()
    other = (tmp_path / "c/small/plain" / DIGESTS).read_text().splitlines()
    (tmp_path / "a/small/plain" / DIGESTS).write_text("\n".join([*lines[:2], other[2], *lines[3:]]))
    assert [step for _, step in read_digests(tmp_path / "a/small/plain")] == [2, 4]  # the chain ends there
    (tmp_path / "a/small/plain" / DIGESTS).write_text(other[0])
    with pytest.raises(DivergedError, match=r"diverges from .* at step 2 \(epoch 0\), first in parameters/0.weight"):
        rewind(tmp_path / "a", StepRange(7, 8))


@pytest.mark.slow
def test_resumed_run_has_uninterrupted_digest_chain(tmp_path, recwarn):
    """After a kill with a damaged digest file, the resumed run warns and starts a new chain."""
    options = {**OPTIONS, "digest_every": 1}
    session(tmp_path / "whole", **options).run()
    assert kill_after(8, tmp_path / "killed", tmp_path / "left", **options)
    session(tmp_path / "left", **options, resume=True).run()
    files = [tmp_path / name / "small/plain" / DIGESTS for name in ("whole", "left")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(read_digests(files[0].parent)) == 12
    assert kill_after(8, tmp_path / "killed again", tmp_path / "left again", **options)
    damaged = tmp_path / "left again/small/plain" / DIGESTS
    damaged.write_bytes(damaged.read_bytes().replace(b"loop", b"pool"))
    session(tmp_path / "left again", **options, resume=True).run()
    changed = "has changed since the checkpoint was written; a new chain of digests starts"
    assert any(changed in str(warning.message) for warning in recwarn)
    assert [step for _, step in read_digests(damaged.parent)][-4:] == [9, 10, 11, 12]
