"""``loopscope equal``: whether an edit of a training helps, by pairs of runs or of records."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope.cli import main
from torch import nn

TRAINING = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(30):
    x = torch.randn(16, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


VALUES = {
    "a": {"val_loss": [0.5, 0.6, 0.7, 0.8, 0.9, 1.0], "noise": [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]},
    "b": {"val_loss": [0.6, 0.71, 0.8, 0.9, 1.0, 1.1], "noise": [0.8, 0.3, 0.9, 0.7, 1.2, 0.6]},
}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Record six runs for each side, which report the values."""
    folders = []
    for side, values in VALUES.items():
        folder = tmp_path_factory.mktemp(side)
        for number, (loss, noise) in enumerate(zip(*values.values(), strict=True)):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with loopscope.attach(model, optimizer, hooks=[], out=folder / f"run_{number}", display="none") as scope:
                model(torch.ones(4, 2)).mean().backward()
                optimizer.step()
                scope.log({"val_loss": loss, "val_acc": 1 - loss, "noise": noise})
        folders.append(str(folder))
    return folders[0], folders[1]


@pytest.mark.longer
def test_records_are_compared_in_pairs(sides: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """The exit status tells whether B may stay; of accuracies higher ones are better."""
    a, b = sides
    assert main(["equal", a, b, "--metric", "val_loss"]) == 1
    assert capfd.readouterr().out.startswith("B is worse: reported/val_loss of B differs by +13.56 % of A's 0.75")
    assert main(["equal", b, a, "--metric", "val_loss", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["answer"], answer["pairs"], answer["alpha"]) == ("better", 6, 0.05)
    assert answer["low"] < answer["difference"] < answer["high"] < 0
    assert main(["equal", a, b, "--metric", "val_acc"]) == 1
    assert main(["equal", a, b, "--metric", "val_loss", "--within", "0.5"]) == 0
    assert "B is equal to A within" in capfd.readouterr().out
    assert main(["equal", a, b, "--metric", "val_lss"]) == 2
    assert "Unknown metric 'val_lss'" in capfd.readouterr().err


@pytest.mark.longer
def test_undecided_pairs_name_what_would_decide(sides: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["equal", *sides, "--metric", "noise", "--json"]) == 3
    answer = json.loads(capfd.readouterr().out)
    assert answer["answer"] == "undecided"
    assert answer["pairs_needed"] > 100
    assert answer["deciding"]["reported/val_loss"] == 4
    assert main(["equal", *sides, "--metric", "noise"]) == 3
    shown = capfd.readouterr().out
    assert f"About {answer['pairs_needed']:,} pairs would decide." in shown
    assert "reported/val_loss would decide within the same margin with about 4 pairs." in shown


@pytest.mark.longer
def test_ledger_divides_the_error_among_questions(
    sides: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A question that is asked again keeps its share; a new one gets a smaller one."""
    ledger, shares = tmp_path / "ledger.jsonl", []
    for within in ("1%", "2%", "1%"):
        words = [
            "equal",
            sides[0],
            sides[0],
            "--within",
            within,
            "--metric",
            "noise",
            "--ledger",
            str(ledger),
            "--json",
        ]
        assert main(words) == 0
        shares.append(json.loads(capfd.readouterr().out)["alpha"])
    assert shares[0] == shares[2] == 4 * shares[1] < 0.05
    ledger.write_text("not JSON")
    assert main(words) == 2
    assert "cannot be read as a ledger" in capfd.readouterr().err


REFUSED = {
    "equal": "takes two commands or two folders, each in quotes, but got 0",
    "equal 'python a.py'": "takes two commands or two folders, each in quotes, but got 1",
    "equal 'no-such-command x' 'python b.py'": "'no-such-command' is not a command",
    "equal --within 0 'python a.py' 'python b.py'": "'0' is not a margin: give a share of A's mean such as 0.5%",
    "equal --git main 'python a.py'": "--git is 'main'; give two revisions such as main..HEAD",
    "equal --pairs 0 'python a.py' 'python b.py'": "'0' is not an integer of at least 1",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_questions_are_refused(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(words)) == 2
    assert REFUSED[words] in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_commands_run_in_pairs_with_equal_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same command is equal after four pairs, bit for bit; a failing one ends the question with its output.

    ``test_revisions_are_compared`` asks about a command that is worse.
    """
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINING)
    command = f"{sys.executable} train.py"
    assert main(["equal", f"{command} 0.1", f"{command} 0.1", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["answer"], answer["pairs"], answer["difference"], answer["repeat_of_a"]) == ("equal", 4, 0, 0)
    assert len({a for a, _ in answer["values"]}) == 4  # other seeds
    assert main(["equal", f"{command} 0.1", f"{command} much"]) == 2
    assert "train.py much ended with status 1; its output is in" in capfd.readouterr().err
    Path("idle.py").write_text("")
    assert main(["equal", f"{sys.executable} idle.py", f"{command} 0.1"]) == 2  # in spite of the earlier runs
    assert "has made no step of an optimizer of torch" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_revisions_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each revision runs in a separate work tree, which is removed afterwards."""
    monkeypatch.chdir(tmp_path)

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for factor in ("0.1", "0.001"):
        Path("train.py").write_text(TRAINING.replace("float(sys.argv[1])", factor))
        git("add", "train.py")
        git("commit", "-qm", factor)
    assert main(["equal", "--git", "HEAD~1..HEAD", f"{sys.executable} train.py"]) == 1
    assert git("worktree", "list").count("\n") == 1
    assert main(["equal", "--git", "HEAD..nowhere", f"{sys.executable} train.py"]) == 2
    assert "git has no tree of 'nowhere'" in capfd.readouterr().err


def test_help_has_its_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["equal", "--help"]) == 0
    assert "--within 0.5%\n" in capsys.readouterr().out
