"""The piped output of ``make run``: at most 120 lines, with the answer within the last 15."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.running import recipes

SHORT = (
    "--max-epochs 15 --snapshot-every 1 --eval-every 1 --batch-size 64 --embed-dim 16 --num-heads 2 --layers 1 "
    "--ff-dim 16 --p 23 --train-size 270 --test-size 200 --hook-config loss_spikes.window=2 loss_spikes.threshold=1"
)
"""The same strategies, hooks, sinks and number of SNAPSHOTs; spikes in nearly every epoch."""


def printed(folder: Path, options: str) -> list[str]:
    """Run the command of ``make run`` with further options into a pipe, and return its lines."""
    (recipe,) = [line for line in recipes()["run"] if "/loopscope run " in line]
    words = [*recipe.split("/loopscope ")[1].split(), "--output-dir", "out", *options.split()]
    done = subprocess.run(
        [sys.executable, "-m", "loopscope", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def assert_short_and_answered(lines: list[str]) -> None:
    assert len(lines) <= 120
    answer = lines[-15:]
    heading = next(index for index, line in enumerate(answer) if line.split()[:1] == ["strategy"])
    assert [line.split()[0] for line in answer[heading + 2 : heading + 4]] == ["stride", "target"]
    for begin in (
        "Results: ",
        "  record ",
        "  alerts ",
        "  weights ",
        "Next: loopscope show ",
        "      loopscope plot ",
    ):
        assert [line for line in answer if line.startswith(begin)], begin


@pytest.mark.slow
@pytest.mark.process
def test_shortened_main_job_prints_short_output(tmp_path: Path) -> None:
    """Piped output has a line per epoch, the first remark of each kind, and the answer in its last lines."""
    lines = printed(tmp_path, SHORT)
    assert_short_and_answered(lines)
    for strategy in ("stride", "target"):
        epoch_lines = [line for line in lines if line.startswith(f"{strategy}, epoch ")]
        assert [int(line.split()[2].strip(",")) for line in epoch_lines] == list(range(15))
        assert all(re.search(r"val_acc [\d.e-]+, .*; [\d,]+ values recorded", line) for line in epoch_lines)
    # Spikes from which the loss recovers are remarks: the first of each kind is shown, and all are recorded.
    assert not [line for line in lines if line.startswith(("alert: ", "critical alert: "))]
    remarks = [line for line in lines if line.startswith("note: loss_spikes/")]
    assert 0 < len(remarks) <= 4
    recorded = sum(len((tmp_path / f"out/mod_arithmetic/{name}/alerts.jsonl").read_text().splitlines())
                   for name in ("stride", "target"))  # fmt: skip
    assert recorded > 20


@pytest.mark.slow
def test_full_main_job_prints_short_output(tmp_path: Path) -> None:
    """Piped output has at most 120 lines, with the answer in the last 15."""
    assert_short_and_answered(printed(tmp_path, ""))
