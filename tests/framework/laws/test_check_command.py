"""``loopscope check`` on scripts."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
from loopscope.cli import main
from loopscope.cli.check import _sorted
from loopscope.cli.check_progress import _print_lines
from rich.console import Console

pytestmark = pytest.mark.process
LOOPSCOPE = Path(sys.executable).parent / "loopscope"
SCRIPT = """
import sys
import torch
from torch import nn


class Metric(nn.Module):  # as in torchmetrics: it has no hash before its constructor has ended
    def __init__(self):
        super().__init__()
        self.states = ()

    def __hash__(self):
        return hash(self.states)


class Configured(nn.Linear):
    def __init__(self, *sizes, **options):
        sizes, options, given = None, None, sizes
        super().__init__(*given)


metric, configured = Metric(), Configured(2, 3)
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


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a script in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def test_broken_law_is_shown_and_counted(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    laws = "every_parameter_learns,rows-do-not-mix"
    assert main(["check", "--batches", "2", "--laws", laws, "--", sys.executable, script]) == 1
    shown = " ".join(capfd.readouterr().out.split())
    assert "every trainable parameter has a gradient and moves: 2.bias, 2.weight: in no optimizer" in shown
    assert "holds outputs of a row do not depend on other rows" in shown
    assert "Laws: 1 broken, 1 hold, 0 not checked. Broken: every_parameter_learns" in shown
    assert "weights" not in shown


SHIFTED = """
import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(0)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.projection, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20)

    def forward(self, ids):
        query, key, value = (part[:, None] for part in self.projection(self.embedding(ids)).chunk(3, -1))
        return self.head(functional.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0])


model = Decoder()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(40):
    ids = torch.randint(20, (8, 12))
    logits, labels = model(ids)[:, :-1 - SHIFT], ids[:, 1 + SHIFT:]
    optimizer.zero_grad()
    functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("shift", [0, 1])
def test_mistakes_in_the_set_up_are_shown(shift: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No law forbids targets that are shifted twice; the doctor finds them."""
    path = tmp_path / "train.py"
    path.write_text(SHIFTED.replace("SHIFT", str(shift)))
    assert main(["check", "--json", "--batches", "1", "--", sys.executable, str(path)]) == shift
    content = json.loads(capfd.readouterr().out)
    assert [finding["id"] for finding in content["findings"]] == ["targets-shifted-wrongly"] * shift
    assert content["broken"] == 0


@pytest.mark.slow
def test_continued_script_ends_with_its_own_weights(script: str) -> None:
    """The tries are rolled back: the sum of the weights has the same digits. Their optimizers are no trainings."""
    words = [sys.executable, script, "right"]
    command = [str(LOOPSCOPE), "check", "--json", "--continue", "--", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    content = json.loads(result.stdout)
    assert (content["broken"], content["holds"] > 5, len(result.stdout) < 4096) == (0, True, True)
    bare = subprocess.run(words, capture_output=True, text=True, check=True)
    assert bare.stdout.strip() in result.stderr
    assert "loopscope watch" not in result.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["check"], "check needs the command of a training, or an experiment"),
        (["check", "--laws", "rows_do_not_mx", "python", "x.py"], "Unknown law 'rows_do_not_mx'"),
        (["check", "--batches", "0", "python", "x.py"], "'0' is not an integer of at least 1"),
        (["check", "--", sys.executable, "-c", "pass"], "No law was tried, since no module over"),
    ],
)
def test_impossible_checks_are_refused(words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capfd.readouterr().err
    assert sentence in shown
    assert "Traceback" not in shown


def test_output_appears_above_the_bar() -> None:
    """Of a line that the command writes again, as a progress bar does, the last version counts."""
    ours, theirs = os.openpty()
    os.write(theirs, b"first\n 10%\r 20%\nrest")
    console = Console(file=io.StringIO(), width=40)
    reader = Thread(target=_print_lines, args=(ours, console))
    reader.start()
    os.close(theirs)
    reader.join()
    assert console.file.getvalue() == "first\n 20%\nrest\n"


def test_symptoms_follow_causes() -> None:
    broken = ["one_batch_can_be_learned", "input_matters", "rows_do_not_mix"]
    laws = [{"law": name, "verdict": "broken"} for name in broken] + [{"law": "future_is_not_seen", "verdict": "holds"}]
    ordered = [law["law"] for law in _sorted(laws, ("broken", "not checked", "holds"))]
    assert ordered == [*reversed(broken), "future_is_not_seen"]


TWO = """
import sys
import torch
from torch import nn

for steps, parts in ((6, [0, 2]), (int(sys.argv[1]), [0])):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD([item for part in parts for item in model[part].parameters()], 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("steps", "status"), [(2, 0), (6, 1)])
def test_later_trainings_are_checked(
    steps: int, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A later training whose laws were not tried at all steps shows nothing."""
    (tmp_path / "train.py").write_text(TWO)
    words = ["--batches", "2", "--laws", "every_parameter_learns", "--json", "--continue"]
    assert main(["check", *words, "--", sys.executable, str(tmp_path / "train.py"), str(steps)]) == status
    content = json.loads(capfd.readouterr().out)
    assert content.get("note", "") == "Laws were also tried in training 2." * status
    assert [law.get("training", 1) for law in content["laws"]] == [2, 1][1 - status :]


def test_end_of_the_command_is_noted(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--batches", "1", "--laws", "rows_do_not_mix", "--", sys.executable, script, "right"]
    assert main(["check", *words]) == 0
    assert "The command was ended here: --continue also tries" in " ".join(capfd.readouterr().out.split())


MASTER = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3).to(torch.bfloat16)
copies = [item.detach().float().requires_grad_("plain" not in sys.argv) for item in model.parameters()]
optimizer = torch.optim.SGD(copies, 0.1)
for step in range(8):
    model.zero_grad()
    model(torch.randn(16, 4).bfloat16()).float().square().mean().backward()
    for copy, item in zip(copies, model.parameters()):
        copy.grad = item.grad.float()
    optimizer.step()
    with torch.no_grad():
        for copy, item in zip(copies, model.parameters()):
            item.copy_(copy)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["leaf", "plain"])
def test_copies_of_weights_are_trained(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An optimizer over copies in float32 trains a model in bfloat16."""
    path = tmp_path / "train.py"
    path.write_text(MASTER)
    words = ["--batches", "2", "--laws", "every_parameter_learns", "--", sys.executable, str(path), kind]
    assert main(["check", *words]) == 0
    assert "holds" in capfd.readouterr().out
