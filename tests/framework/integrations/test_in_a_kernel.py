"""A notebook in a real kernel: the outputs of its cells, and the effect of running a cell again."""

import base64
import re
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

TRAIN = """
def train(stop=None, epochs=30, **options):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = loopscope.attach(model, optimizer, length=epochs, **options)
    for epoch in range(epochs):
        for inputs, targets in scope.batches(data):
            scope.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if stop is not None:
                raise stop
        scope.epoch_end(val_loss=1.0 / (1 + epoch))
    scope.close()
    return scope
"""
HOOK = """
from loopscope import HookPoint, HookRegistry, MetricInfo, TrainingHook

@HookRegistry.register
class Mine(TrainingHook):
    "One number."
    name = "mine"
    hook_points = {HookPoint.POST_STEP}
    def compute(self, ctx):
        return {"x": NUMBER}
    def describe_metrics(self):
        return [MetricInfo("x", "x", "x", "x")]
"""
SESSION = """
from pathlib import Path
from signal import SIGINT, raise_signal
from loopscope.console import watch
from loopscope.experiments import ModArithmeticRunner
from loopscope.runs import RunOptions, Session
from loopscope.sinks import JSONLSink

@HookRegistry.register
class Interrupting(TrainingHook):
    "Interrupts the kernel once, as its button does."
    name, hook_points, left = "interrupting", {HookPoint.POST_STEP}, 1
    def compute(self, ctx):
        if ctx.step == 3 and Interrupting.left:
            Interrupting.left = 0
            raise_signal(SIGINT)
        return {}
    def describe_metrics(self):
        return []

config = ModArithmeticRunner.config_class(
    p=11, train_size=80, test_size=40, embed_dim=16, ff_dim=16, layers=1, epochs=12, snapshot_every=1,
    output_dir=Path("sessions"),
)

def run(hooks=(), **options):
    options = RunOptions(strategies=["stride", "random"], hooks=["norms", *hooks], **options)
    return watch(Session(ModArithmeticRunner(config), options, lambda: [JSONLSink()]))
"""
CELLS = {
    "setup": "import torch, signal, sys, warnings\nfrom torch import nn\n"
    "data = [(torch.randn(20, 4), torch.randint(3, (20,))) for _ in range(10)]",
    "import": "def kept():\n"
    "    handlers = [signal.getsignal(number) for number in signal.valid_signals()]\n"
    "    return sys.excepthook, sys.displayhook, warnings.showwarning, list(warnings.filters), handlers\n"
    "before = kept()\nimport loopscope\nfrom loopscope import *\nprint(kept() == before)",
    "train": f"{TRAIN}\nscope = train(hooks=['norms'], out='runs/a')",
    "table": "scope",
    "curves": "loopscope.plot(scope.folder, 'training_metrics/loss', 'norms/total_*')",
    "refused": "train(out='runs/a')",
    "overwrite": "train(out='runs/a', overwrite=True, epochs=2, display='silent').folder",
    "hostile": "from loopscope.console import NotebookOutput, make_console\nfrom rich.text import Text\n"
    "output = NotebookOutput(make_console())\noutput.update('first')\noutput.update(Text('a\\x1b[2Jb<script>'))",
    "hook": HOOK.replace("NUMBER", "1.0"),
    "hook again": HOOK.replace("NUMBER", "2.0"),
    "hooked": "print(train(hooks=['mine'], out='runs/b', epochs=1, display='none').last_metrics()['mine/x'])",
    "broken hook": HOOK.replace("NUMBER", "1 / 0"),
    "broken": "train(hooks=['mine'], out='runs/c', display='none')",
    "interrupted": "train(KeyboardInterrupt(), out='runs/d', display='none')",
    "unclosed": "train(out='runs/d', epochs=1, display='none')",
    "again": "print(train(out='runs/d', overwrite=True, epochs=1, display='none').folder)",
    "session": f"{SESSION}\nsummaries = run()",
    "session refused": "run()",
    "session interrupted": "run(['interrupting'], overwrite=True)",
    "session resumed": "print([summary['status'] for summary in run(['interrupting'], resume=True)])",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Run all cells and return the outputs of each."""
    path = tmp_path_factory.mktemp("notebook") / "cells.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, CELLS.values()))), path)
    # In a separate process with the kernel's Python, since nbclient leaves sockets open.
    words = [sys.executable, "-c", "from nbclient.cli import main; main()", "--allow-errors", "--inplace", str(path)]
    subprocess.run(words, check=True, capture_output=True, timeout=300)
    return dict(zip(CELLS, [cell.outputs for cell in nbformat.read(path, as_version=4).cells], strict=True))


def shown(outputs: list[Any]) -> list[str]:
    """Return the texts of outputs without colours."""
    texts = [out.data["text/plain"] if "data" in out else out.get("text", out.get("evalue", "")) for out in outputs]
    return [re.sub(r"\x1b\[[\d;]*m", "", text) for text in texts]


def error(outputs: list[Any]) -> tuple[str, str]:
    """Return the class of an error and its traceback without colours."""
    assert outputs[-1].output_type == "error", outputs
    return outputs[-1].ename, re.sub(r"\x1b\[[\d;]*m", "", "\n".join(outputs[-1].traceback))


@pytest.mark.slow
def test_import_leaves_the_interpreter_unchanged(outputs):
    assert shown(outputs["import"]) == ["True\n"]


@pytest.mark.slow
def test_training_updates_its_outputs_in_place(outputs):
    """A notebook cell shows one header, bar, line, result and folder."""
    header, bar, line, result, where = shown(outputs["train"])
    assert "attached a: Sequential of 67 parameters" in header
    assert "100%  epoch 30/30" in bar
    assert "a, epoch 29, step 300: loss " in line
    assert "ended after 30 epochs" in result
    assert "Results: runs/a" in where
    assert all("text/html" in out.data for out in outputs["train"])


def test_scope_displays_table_and_curves(outputs):
    """A scope renders as an HTML table, and its curves render as a PNG image."""
    (table,) = outputs["table"]
    assert "norms/total_grad_norm" in table.data["text/html"]
    (curves,) = outputs["curves"]
    assert base64.b64decode(curves.data["image/png"]).startswith(b"\x89PNG")


def test_second_run_in_folder_is_refused(outputs):
    """The error suggests another out or overwrite=True, and overwriting works."""
    kind, trace = error(outputs["refused"])
    assert kind == "UsageError"
    assert "runs/a already holds a finished run" in trace
    assert "give attach another folder, out=, or overwrite=True." in trace
    assert "--overwrite" not in trace.splitlines()[-1]
    bar, folder = shown(outputs["overwrite"])
    assert "epoch 2/2" in bar
    assert "runs/a" in folder


def test_displayed_text_is_escaped(outputs):
    """Output has no terminal escape sequences in plain text and no script tags in HTML."""
    (output,) = outputs["hostile"]
    assert "\x1b[2J" not in output.data["text/plain"]
    assert "[2Jb&lt;script&gt;" in output.data["text/html"]


def test_running_a_cell_again_replaces_its_hook(outputs):
    assert outputs["hook"] == outputs["hook again"] == []
    assert shown(outputs["hooked"]) == ["2.0\n"]


def test_hook_error_shows_user_code_line(outputs):
    """The traceback in the notebook contains the failing line of the hook."""
    kind, trace = error(outputs["broken"])
    assert kind == "HookError"
    assert re.search(r'ZeroDivisionError: division by zero \[.*in compute: return {"x": 1 / 0}\]', trace)
    assert "train(hooks=['mine'], out='runs/c', display='none')" in trace


def test_interrupted_cell_can_run_again(outputs):
    """The new cell runs although the scope of the interrupted cell was never closed."""
    assert error(outputs["interrupted"])[0] == "KeyboardInterrupt"
    assert "runs/d already holds an unfinished run" in error(outputs["unclosed"])[1]
    assert [text.endswith("/runs/d\n") for text in shown(outputs["again"])] == [True]


def test_session_shows_few_outputs(outputs):
    """A session ends with a table of strategies, and a second session in the folder is refused."""
    texts = shown(outputs["session"])
    assert len(texts) == 2 * len(("header", "bar", "table", "result")) + len(("comparison", "where"))
    assert re.search(r"strategy +epochs.*\n.*\n +stride +12 .*\n +random +12 ", texts[-2])
    kind, trace = error(outputs["session refused"])
    assert kind == "UsageError"
    assert trace.endswith("choose another output_dir in the config, or replace it: RunOptions(overwrite=True).")


def test_interrupted_session_is_resumed(outputs):
    """The interrupted cell prints how to resume, and the next cell completes both strategies."""
    kind, trace = error(outputs["session interrupted"])
    assert (kind, trace.splitlines()[-1]) == ("StoppedError", "StoppedError: Stopped by SIGINT.")
    assert "resume=True in its RunOptions" in "".join(shown(outputs["session interrupted"]))
    assert shown(outputs["session resumed"])[-1] == "['completed', 'completed']\n"
