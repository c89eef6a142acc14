"""Options in messages: words of the command line for its users, arguments for users of Python."""

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope import UsageError, training_hooks
from loopscope.option_words import command_line_messages, hook_option_text, option_text
from loopscope.runs.config import RunOptions
from torch import nn

from tests.docs.markdown import ROOT

assert training_hooks.__all__
FILES = [
    path for name in ("framework", "sinks", "training_hooks", "experiments") for path in (ROOT / name).rglob("*.py")
]
WORD = re.compile(r"(?<![\w-])--[a-z]")
OF_THE_COMMAND = "framework/cli/", "framework/sweeps/"
"""Folders whose messages only users of the command see."""
ALLOWED = {
    "framework/console/tables.py": ["--metrics"],  # a shell command
    "framework/doctor/diagnosis_text.py": ["loopscope check --laws"],  # a shell command
    "framework/doctor/detectors/losses.py": ["--spike"],  # a shell command
    "framework/doctor/detectors/speed.py": ["--profile-hooks"],  # for both, as findings are read by both
    "framework/laboratory/questions/trial_plan.py": ["--save-checkpoints"],  # for users of the command
    "framework/option_words.py": ["--hook-config"],
    "framework/report/page.py": ["--profile-hooks"],  # a heading in the page of the command
    "framework/runs/replay.py": ["--no-"],  # for users of the command
    "framework/runs/provenance.py": ["--porcelain", "--untracked-files"],  # of git
    "framework/runs/run_folder.py": ["--output-dir", "--overwrite"],  # for users of the command
    "framework/training/parallel.py": ["--nproc-per-node"],  # of torchrun
    "sinks/csv.py": ["--hook-csv"],  # the flags of sinks
    "sinks/jsonl.py": ["--hook-jsonl"],
    "sinks/tensorboard_sink.py": ["--hook-tensorboard", "--logdir"],
    "sinks/wandb_sink.py": ["--hook-wandb"],
    "sinks/mlflow_sink.py": ["--hook-mlflow"],
    "sinks/trackio_sink.py": ["--hook-trackio"],
    "sinks/client_sink.py": ["--to"],  # shell commands
    "sinks/trackio_process.py": ["--project"],
}


def texts(path: Path) -> Iterator[str]:
    """Yield the strings of a module that are not documentation."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_messages_take_options_from_one_place(path: Path) -> None:
    """Outside of the command line no message contains one of its options."""
    if not WORD.search(path.read_text(encoding="utf-8")):
        return
    name = str(path.relative_to(ROOT))
    found = [text for text in texts(path) if WORD.search(text)]
    allowed = ALLOWED.get(name, [])
    assert name.startswith(OF_THE_COMMAND) or [t for t in found if not any(word in t for word in allowed)] == []


def test_options_are_written_for_their_reader() -> None:
    assert option_text("reference", Path("a/b")) == "reference='a/b'"
    assert hook_option_text("variance", window="STEPS") == "hook_options={'variance': {'window': STEPS}}"
    with command_line_messages():
        assert option_text("reference", Path("a/b")) == "--reference a/b"
        assert hook_option_text("h", a="NAME", b=2) == "--hook-config h.a=NAME h.b=2"
        with pytest.raises(UsageError, match="--resume and --overwrite exclude each other"):
            RunOptions(resume=True, overwrite=True)
    with pytest.raises(UsageError, match="resume and overwrite exclude each other"):
        RunOptions(resume=True, overwrite=True)


def test_command_line_messages_end_after_an_error() -> None:
    with pytest.raises(KeyError), command_line_messages():
        raise KeyError
    assert option_text("exact") == "exact"


def steps(folder: Path, count: int = 1, **options: object) -> str:
    """Train a linear layer with attached hooks, and return all warnings and the error, if any."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with loopscope.attach(model, optimizer, out=folder / "run", **options) as scope:
                for batch in scope.batches([torch.ones(1, 2)] * count):
                    scope.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
        except loopscope.LoopscopeError as error:
            return str(error)
    return " ".join(str(warning.message) for warning in caught)


REQUESTED = {
    "gradient_flow": "name the blocks with hook_options={'gradient_flow': {'pattern': 'GLOB'}}",
    "loss_spikes": "choose a smaller window with hook_options={'loss_spikes': {'window': N}}",
    "variance": "Set a shorter window with hook_options={'variance': {'window': STEPS}}",
    "token_gradient": "Name a parameter with hook_options={'token_gradient': {'embedding': 'NAME'}}",
    "subspace_gradient_info": "hook_options={'subspace_gradient_info': {",
}


@pytest.mark.parametrize("hook", REQUESTED)
def test_attached_hook_names_its_option_in_python(hook: str, tmp_path: Path) -> None:
    assert REQUESTED[hook] in steps(tmp_path, hooks=[hook], length=1, loop="step", display="none")


@pytest.mark.longer
@pytest.mark.parametrize("group", ["full", "observers", "interventions"])
def test_attached_groups_report_no_command_line_options(group: str, tmp_path: Path, capsys) -> None:
    """The reasons for which hooks are left out reach users of Python."""
    report = steps(tmp_path, with_hooks=group, length=1, loop="step") + "".join(capsys.readouterr())
    assert "hook_options" in report or group == "interventions"
    assert WORD.findall(re.sub(r"loopscope plot .*", "", report)) == []  # a shell command
