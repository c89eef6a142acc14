"""``loopscope check`` on scripts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
LOOPSCOPE = Path(sys.executable).parent / "loopscope"
SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
parts = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)]
model = nn.Sequential(*parts)
optimizer = torch.optim.SGD(model.parameters() if "right" in sys.argv else model[0].parameters(), 0.1)
for step in range(8):
    x = torch.randn(16, 4)
    loss = (model(x)[:, 0] - x.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("weights", sum(float(item.detach().double().sum()) for item in model.parameters()))
"""


def checked(words: list[str], folder: Path, *after: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [str(LOOPSCOPE), "check", *words, "--", sys.executable, "train.py", *after]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_broken_law_is_shown_and_counted(tmp_path: Path) -> None:
    result = checked(["--laws", "every_parameter_learns,rows-do-not-mix"], tmp_path)
    assert result.returncode == 1
    shown = " ".join(result.stdout.split())
    assert "every trainable parameter has a gradient and moves: 2.bias, 2.weight: in no optimizer" in shown
    assert "holds outputs of a row do not depend on other rows" in shown
    assert "weights" not in shown


def test_continued_script_ends_with_its_own_weights(tmp_path: Path) -> None:
    """The tries are rolled back: the sum of the weights has the same digits."""
    result = checked(["--json", "--continue"], tmp_path, "right")
    assert result.returncode == 0
    content = json.loads(result.stdout)
    assert (content["broken"], content["holds"] > 5, len(result.stdout) < 4096) == (0, True, True)
    bare = subprocess.run(
        [sys.executable, "train.py", "right"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert bare.stdout.strip() in result.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["check"], "check needs the command of a training, or an experiment"),
        (["check", "--laws", "rows_do_not_mx", "python", "x.py"], "Unknown law 'rows_do_not_mx'"),
        (["check", "--batches", "0", "python", "x.py"], "'0' is not an integer of at least 1"),
        (["check", "--", sys.executable, "-c", "import torch"], "No law was tried, since it made no step"),
    ],
)
def test_impossible_checks_are_refused(words: list[str], sentence: str) -> None:
    result = subprocess.run([str(LOOPSCOPE), *words], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
