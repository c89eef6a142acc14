"""``loopscope verify`` and ``loopscope rewind`` run the command of a watched run again."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope import sinks, training_hooks
from loopscope.cli import main
from torch import nn

from .test_watch import TRAINERS, TRAINING, run, script

FILLED = (sinks, training_hooks)  # whose hooks the command knows by their names


def watched(folder: Path) -> Path:
    """Return the folder of a watched training, whose seed is in a file."""
    (folder / "seed.txt").write_text("1")
    path = script(folder, text=TRAINING.replace("manual_seed(0)", "manual_seed(int(open('seed.txt').read()))"))
    result = run(folder, sys.executable, path)
    assert result.returncode == 0, result.stderr
    return folder / "loopscope-runs/run_0"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.guarantee("runs-can-be-verified")
def test_watched_run_is_verified(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command is run again; after a change of its data, the first step and tensor that differ are named."""
    folder = watched(tmp_path)
    assert main(["verify", str(folder)]) == 0
    assert capfd.readouterr().out == "run_0: identical bit for bit at 2 steps: 1, 6\n"
    (tmp_path / "seed.txt").write_text("2")
    assert main(["verify", str(folder)]) == 1
    error = capfd.readouterr().err
    assert "at step 1 (epoch 0), first in parameters/0.weight" in error
    assert "The script is not deterministic, or something besides its main file has changed" in error


@pytest.mark.process
@pytest.mark.slow
def test_watched_steps_are_repeated_with_hooks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """New hooks start at the first step of interest, and the training ends after the last one."""
    folder, hooks = watched(tmp_path), ["--hooks", "gradient_flow", "--gradient_flow.interval", "1"]
    assert main(["rewind", str(folder), "--step", "3", "--until", "4", *hooks]) == 0
    assert "identical, bit for bit, at steps 1." in capfd.readouterr().out
    repeated = loopscope.read_run(folder / "rewinds/steps_3_to_4")
    assert list(repeated.frame("gradient_flow/*").index) == [3, 4]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("library", TRAINERS)
def test_trainers_are_verified_and_repeated(library: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Those that the integrations attach to, with evaluations between the steps."""
    pytest.importorskip(library)
    assert run(tmp_path, sys.executable, script(tmp_path, text=TRAINERS[library])).returncode == 0
    (folder,) = {path.parent for path in tmp_path.rglob("summary.json")}
    assert main(["verify", str(folder)]) == 0
    assert "identical bit for bit at 3 steps: 1, 4, 8\n" in capfd.readouterr().out
    assert main(["rewind", str(folder), "--step", "3", "--until", "5", "--hooks", "norms"]) == 0
    assert "identical, bit for bit" in capfd.readouterr().out
    assert list(loopscope.read_run(folder / "rewinds/steps_3_to_5").frame("norms/*").index)[-1] <= 5


@pytest.mark.process
@pytest.mark.slow
def test_laws_are_tried_in_watched_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command is run again with the law of a finding, also where an earlier attempt has met another run."""
    (tmp_path / "seed.txt").write_text("1")
    text = TRAINING.replace("manual_seed(0)", "manual_seed(int(open('seed.txt').read()))")
    text = text.replace("optimizer = ", "model.spare = nn.Parameter(torch.ones(40))\noptimizer = ")
    assert run(tmp_path, sys.executable, script(tmp_path, text=text)).returncode == 0
    folder, shown = tmp_path / "loopscope-runs/run_0", []
    for seed in ("2", "1"):
        (tmp_path / "seed.txt").write_text(seed)
        assert main(["doctor", str(folder), "--test"]) == 0
        shown.append(" ".join(capfd.readouterr().out.split()))
    assert "Laws were not tried: This run diverges" in shown[0]
    assert "every_parameter_learns: broken at step 5: spare" in shown[1]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.ranks
def test_watched_ranks_are_verified(tmp_path: Path) -> None:
    wrapped = TRAINING.replace("optimizer = ", "model = nn.parallel.DistributedDataParallel(model)\noptimizer = ")
    text = wrapped.replace("torch.manual_seed(0)", "torch.distributed.init_process_group('gloo')\ntorch.manual_seed(0)")
    path = script(tmp_path, "torch.distributed.destroy_process_group()", text)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path]
    assert run(tmp_path, *words).returncode == 0
    assert main(["verify", str(tmp_path / "loopscope-runs/run_0")]) == 0


@pytest.mark.process
@pytest.mark.slow
def test_separate_trainings_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    assert run(tmp_path, "sh", "-c", f"{sys.executable} {path} && {sys.executable} {path}").returncode == 0
    assert main(["verify", str(tmp_path / "loopscope-runs/run_0")]) == 2
    assert "The command trains in 2 processes that do not train together" in capfd.readouterr().err


def attached(folder: Path, origin: Mapping[str, Any]) -> Path:
    """Return the folder of a run of two steps, which was started as the ``origin`` says."""
    model = nn.Linear(2, 1)
    with loopscope.attach(model, torch.optim.SGD(model.parameters(), 0.1), out=folder, display="none") as scope:
        scope.note_origin(origin)
        for batch in scope.batches([torch.ones(4, 2)] * 2):
            scope.backward(model(batch).mean())
            scope.optimizers[0].step()
    return folder


ORIGIN = {
    "watch": {"command": ["no-such-command"], "folder": "/no/such", "options": {"with_hooks": "health"}, "seed": 0}
    | {"variables": {}, "training": 1}
}
REFUSED = {
    "rewind RUN --step 3": "--step is 3, but the last step of the run in RUN is 2.",
    "rewind RUN --step 1 --hooks grad_clip": "RUN was trained with other committing hooks: none; now: grad_clip.",
    "rewind RUN --step 1 --hooks nrms": "Unknown hook 'nrms'.",
    "rewind RUN --step 1 --explain": "--explain and --spike start from checkpoints, which a watched run does not have.",
    "verify RUN --intervals 2": "--intervals starts from checkpoints, which a watched run does not have",
    "verify RUN": "/no/such, the working directory of the command, does not exist.",
}


@pytest.mark.longer
@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("words", REFUSED)
def test_impossible_repetitions_are_refused(words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every refusal is one sentence with exit status 2."""
    folder = str(attached(tmp_path / "run", ORIGIN))
    assert main(words.replace("RUN", folder).split()) == 2
    assert REFUSED[words].replace("RUN", folder) in capfd.readouterr().err


def without_command(record: dict[str, Any]) -> None:
    del record["provenance"]["watch"]


def with_other_script(record: dict[str, Any]) -> None:
    record["provenance"] |= {"script": __file__, "script_xxh3_128": "0" * 32}


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (without_command, "not by loopscope watch, so its command is not known"),
        (with_other_script, "has changed since, so that none of its steps can be repeated; restore the file."),
    ],
)
def test_unknown_commands_are_refused(
    edit: Callable[[dict[str, Any]], None], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = attached(tmp_path / "run", ORIGIN) / "experiment_config.json"
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))
    assert main(["verify", str(path.parent)]) == 2
    assert sentence in capfd.readouterr().err
