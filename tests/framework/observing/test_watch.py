"""``loopscope watch``: commands run unchanged, with a record next to their output."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.framework.cli.test_interrupts_at_start import default_interrupts

pytestmark = pytest.mark.process
TRAINING = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(6):
    inputs = torch.randn(8, 4)
    loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
{last}
print([value.double().sum().item() for value in model.parameters()], torch.rand(1).item(), sys.argv[1:])
"""


def run(folder: Path, *words: str, watched: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, under ``loopscope watch`` or alone."""
    prefix = [sys.executable, "-m", "loopscope", "watch"] if watched else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([*prefix, *words], cwd=folder, capture_output=True, text=True, env=environment, check=False)


def script(folder: Path, last: str = "", text: str = TRAINING) -> str:
    """Write a training, and return its path."""
    path = folder / "train.py"
    path.write_text(text.replace("{last}", last))
    return str(path)


def summary(folder: Path, name: str = "run_0") -> dict[str, Any]:
    """Return the summary of a run."""
    content: dict[str, Any] = json.loads((folder / "loopscope-runs" / name / "summary.json").read_text())
    return content


ARGUMENTS = ("--lr", "1e-3")


COMPILED = """
class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers
    def forward(self, inputs):
        return self.layers(inputs)
model = Net(model)
"""
IN_PLACE = {
    "compile": "model.compile(backend='aot_eager')",
    "forward": "model.forward = torch.compile(model.forward, backend='aot_eager')",
}


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("way", IN_PLACE)
def test_models_compiled_in_place_are_watched(tmp_path: Path, way: str) -> None:
    """The output is that of the script alone, every graph is compared, and a hook with taps reports."""
    text = TRAINING.replace("optimizer = ", f"{COMPILED}{IN_PLACE[way]}\noptimizer = ")
    path = script(tmp_path, "print(torch._dynamo.utils.counters['stats']['unique_graphs'])", text)
    alone, words = run(tmp_path, sys.executable, path, watched=False), ("--hooks", "activations", "--")
    watched = run(tmp_path, *words, sys.executable, path)
    assert (watched.stdout, watched.returncode) == (alone.stdout, 0), watched.stderr
    found = summary(tmp_path)
    assert (found["steps"], found["hooks_left_out"], found["compiled_graphs"]["changed_by"]) == (6, {}, [])
    assert found["compiled_graphs"]["compared"] > 0
    assert any('"activations/' in file.read_text() for file in (tmp_path / "loopscope-runs/run_0").glob("*.jsonl"))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of the script alone, with arguments."""
    folder = tmp_path_factory.mktemp("alone")
    alone = run(folder, sys.executable, script(folder, "sys.stdout.flush()"), *ARGUMENTS, watched=False)
    assert alone.returncode == 0
    return alone.stdout


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
def test_watched_script_is_the_script_alone(tmp_path: Path, output: str) -> None:
    """Its output, arguments and status are its own, and its record is complete."""
    watched = run(tmp_path, sys.executable, script(tmp_path, "sys.stdout.flush()"), *ARGUMENTS)
    assert (watched.stdout, watched.returncode) == (output, 0)
    assert "observing Sequential" in watched.stderr
    found = summary(tmp_path)
    assert (found["status"], found["steps"], found["hook_errors"]) == ("completed", 6, [])
    config = json.loads((tmp_path / "loopscope-runs/run_0/experiment_config.json").read_text())["config"]
    assert config["command"].endswith("train.py --lr 1e-3")


@pytest.mark.parametrize(("last", "status"), [("sys.exit(5)", 5), ("1 / 0", 1)])
@pytest.mark.slow_rows("sys.exit(5)-5")
def test_status_is_that_of_the_command(tmp_path: Path, last: str, status: int) -> None:
    watched = run(tmp_path, sys.executable, script(tmp_path, last))
    assert watched.returncode == status
    if status == 1:
        assert "ZeroDivisionError" in watched.stderr
        assert summary(tmp_path)["status"] == "failed"


def test_status_of_an_abrupt_end_is_kept(tmp_path: Path) -> None:
    """No code of Python runs at such an end, so that the command needs no training."""
    assert run(tmp_path, sys.executable, "-c", "import os; os._exit(7)").returncode == 7


def interrupted(folder: Path, moment: str, *, watched: bool) -> tuple[int, str, list[str]]:
    """Press Ctrl-C while a training sleeps at a moment; return its status, its output, and its lines of errors."""
    sleep = "print('now', flush=True); import time; time.sleep(60)"
    places = {"loading": ("torch.manual_seed(0)", ""), "training": ("    loss.backward()", "    if step == 3: ")}
    line, before = places[moment]
    words = [sys.executable, script(folder, text=TRAINING.replace(line, f"{before}{sleep}\n{line}"))]
    prefix = [sys.executable, "-m", "loopscope", "watch"] if watched else []
    with (
        default_interrupts(),
        subprocess.Popen(
            [*prefix, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        time.sleep(0.2)  # until the process sleeps
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [pytest.param("loading", marks=pytest.mark.slow), "training"])
def test_interrupted_training_ends_as_alone(tmp_path: Path, moment: str) -> None:
    """Ctrl-C has the status, the output and the traceback of the script alone; the open step is in the record."""
    alone = interrupted(tmp_path, moment, watched=False)
    status, output, errors = interrupted(tmp_path, moment, watched=True)
    assert (status, output, [line for line in errors if not line.startswith("loopscope")]) == alone
    assert alone[0] == -signal.SIGINT
    if moment == "training":
        assert (summary(tmp_path)["status"], summary(tmp_path)["steps"]) == ("interrupted", 4)


@pytest.mark.slow
def test_optimizers_of_fastai_are_noticed(tmp_path: Path) -> None:
    """By the module of their class, here a package with the layout of fastai's."""
    package = tmp_path / "fastai"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "optimizer.py").write_text(
        "import torch\n\n\nclass Optimizer:\n"
        "    def __init__(self, parameters, lr):\n"
        "        self.inner = [*parameters]\n"
        "        self.lr = lr\n\n"
        "    @property\n    def param_groups(self):\n        return [{'params': self.inner, 'lr': self.lr}]\n\n"
        "    def zero_grad(self):\n        for item in self.inner:\n            item.grad = None\n\n"
        "    @torch.no_grad()\n    def step(self):\n"
        "        for item in self.inner:\n            item.sub_(item.grad, alpha=self.lr)\n"
    )
    text = TRAINING.replace("torch.optim.AdamW", "Optimizer").replace(
        "import sys, torch", "import sys, torch\nfrom fastai.optimizer import Optimizer"
    )
    alone = run(tmp_path, sys.executable, script(tmp_path, text=text), watched=False)
    watched = run(tmp_path, sys.executable, script(tmp_path, text=text))
    assert alone.stdout == watched.stdout
    assert summary(tmp_path)["steps"] == 6


@pytest.mark.slow
def test_training_stops_after_some_steps(tmp_path: Path) -> None:
    watched = run(tmp_path, "--stop-after", "3", "--", sys.executable, script(tmp_path))
    assert (watched.returncode, watched.stdout) == (0, "")
    assert summary(tmp_path)["steps"] == 3


@pytest.mark.slow
def test_training_continues_without_a_record(tmp_path: Path, output: str) -> None:
    """The folder of the record cannot be created, which is only noticed at the first step."""
    watched = run(tmp_path, "--out", "/proc/none/run", "--", sys.executable, script(tmp_path), *ARGUMENTS)
    assert (watched.stdout, watched.returncode) == (output, 0)
    assert watched.stderr.count("continues without loopscope") == 1
    assert "Traceback" not in watched.stderr


@pytest.mark.slow
def test_training_stops_at_a_critical_finding(tmp_path: Path) -> None:
    text = TRAINING.replace("loss.backward()", "(loss * float('nan')).backward()")
    watched = run(tmp_path, "--stop-on", "nonfinite", "--", sys.executable, script(tmp_path, text=text))
    assert watched.returncode == 3


@pytest.mark.slow
def test_seeds_are_shifted(tmp_path: Path) -> None:
    """The seed of a run is that of the script plus the given number."""
    shifted = run(tmp_path, "--seed", "4", "--", sys.executable, script(tmp_path))
    text = TRAINING.replace("manual_seed(0)", "manual_seed(4)")
    alone = run(tmp_path, sys.executable, script(tmp_path, text=text), watched=False)
    assert shifted.stdout == alone.stdout


def test_own_site_customisation_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    text = "import os\nif 'LOOPSCOPE_WATCH' in os.environ:\n    print('mine')\n"  # not in the process of the command
    (tmp_path / "site/sitecustomize.py").write_text(text)
    watched = run(tmp_path, sys.executable, "-c", "print('done')", PYTHONPATH=str(tmp_path / "site"))
    assert watched.stdout.split() == ["mine", "done"]
    assert "no step of an optimizer" in watched.stderr


@pytest.mark.slow
def test_adversaries_have_separate_records(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
generator, critic = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
first, second = (torch.optim.SGD(module.parameters(), 0.1) for module in (generator, critic))
for _ in range(4):
    first.zero_grad()
    critic(generator(torch.randn(4, 2))).mean().backward()
    first.step()
    second.zero_grad()
    critic(torch.randn(4, 2)).square().mean().backward()
    second.step()
"""
    watched = run(tmp_path, sys.executable, script(tmp_path, text=text))
    assert watched.returncode == 0
    assert [summary(tmp_path, name)["steps"] for name in ("run_0", "run_1")] == [4, 4]


@pytest.mark.slow
def test_parts_that_are_called_alone_are_one_training(tmp_path: Path) -> None:
    """An encoder and a decoder with one optimizer, called one after the other."""
    text = """
import torch
from torch import nn
encoder, decoder = nn.Linear(4, 2), nn.Linear(2, 4)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 0.1)
for _ in range(4):
    inputs = torch.randn(8, 4)
    loss = (decoder(encoder(inputs)) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    watched = run(tmp_path, sys.executable, script(tmp_path, text=text))
    assert watched.returncode == 0, watched.stderr
    assert summary(tmp_path)["steps"] == 4


@pytest.mark.parametrize("flag", ["-I", "-S", "-sE"])
@pytest.mark.slow_rows("-S", "-sE")
def test_python_without_our_folder_is_refused(tmp_path: Path, flag: str) -> None:
    watched = run(tmp_path, sys.executable, flag, "train.py")
    assert watched.returncode == 2
    assert "leave the option out" in watched.stderr


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ([], 2, "needs the command"),
        (["no-such-program"], 127, "not a command"),
        (["--stop-after", "0"], 2, "'0'"),
        (["--budget", "fast"], 2, "'fast' is not a share such as 5%"),
    ],
)
def test_wrong_commands_are_refused(tmp_path: Path, words: list[str], status: int, sentence: str) -> None:
    watched = run(tmp_path, *words)
    assert (watched.returncode, sentence in watched.stderr) == (status, True)
    assert "Traceback" not in watched.stderr


TRIALS = """
import gc, weakref, torch
from torch import nn
models = []
def trial(rate):
    model = nn.Linear(4, 2)
    models.append(weakref.ref(model))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
for rate in (0.1, 0.2, 0.3):
    trial(rate)
gc.collect()
print([model() is None for model in models])
"""


@pytest.mark.slow
def test_models_of_ended_trials_are_freed(tmp_path: Path) -> None:
    watched = run(tmp_path, sys.executable, script(tmp_path, text=TRIALS))
    assert watched.stdout.split() == ["[True,", "True,", "False]"]  # the last run is open until the process ends
    assert [summary(tmp_path, f"run_{index}")["steps"] for index in range(3)] == [3, 3, 3]


@pytest.mark.slow
def test_destroyed_process_group_leaves_a_complete_record(tmp_path: Path) -> None:
    """The runs of two ranks end before the group through which they exchange data."""
    wrapped = TRAINING.replace("optimizer = ", "model = nn.parallel.DistributedDataParallel(model)\noptimizer = ")
    text = wrapped.replace("torch.manual_seed(0)", "torch.distributed.init_process_group('gloo')\ntorch.manual_seed(0)")
    path = script(tmp_path, "torch.distributed.destroy_process_group()", text)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path]
    watched = run(tmp_path, *ranks)
    assert (watched.returncode, "Traceback" in watched.stderr) == (0, False), watched.stderr
    assert (summary(tmp_path)["status"], summary(tmp_path)["steps"]) == ("completed", 6)


@pytest.mark.slow
def test_forked_trainings_have_complete_records(tmp_path: Path) -> None:
    """A process of multiprocessing ends without calling ``atexit``."""
    lines = [line for line in TRAINING.splitlines() if line and not line.startswith(("import", "{"))]
    text = "import sys, torch, multiprocessing\ndef train():\n    " + "\n    ".join(lines)
    text += "\nchild = multiprocessing.get_context('fork').Process(target=train)\nchild.start()\nchild.join()\n"
    watched = run(tmp_path, sys.executable, script(tmp_path, text=text))
    assert watched.returncode == 0, watched.stderr
    assert (summary(tmp_path)["status"], summary(tmp_path)["steps"]) == ("completed", 6)


@pytest.mark.slow
def test_first_closure_is_observed(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
model = nn.Linear(4, 2)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).square().mean()
    loss.backward()
    return loss
for _ in range(4):
    optimizer.step(closure)
"""
    watched = run(tmp_path, sys.executable, script(tmp_path, text=text))
    assert watched.returncode == 0, watched.stderr
    assert summary(tmp_path)["steps"] == 4


TRAINERS = {
    "lightning": """
import lightning, torch
from torch import nn
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, index):
        self.log("val_loss", self.training_step(batch, index))
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)
torch.manual_seed(0)
model, rows = Model(), torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
off = {name: False for name in ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")}
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **off)
trainer.fit(model, torch.utils.data.DataLoader(rows, 8, shuffle=True), torch.utils.data.DataLoader(rows, 8))
""",
    "transformers": """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x=None, labels=None):
        outputs = self.layer(x)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}
torch.manual_seed(0)
model, rows = Model(), [{"x": torch.randn(4), "labels": index % 3} for index in range(32)]
off = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
arguments = TrainingArguments("out", num_train_epochs=2, eval_strategy="epoch", **off)
Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8]).train()
""",
}
"""Trainings with evaluations, by library."""


@pytest.mark.slow
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("library", TRAINERS)
def test_trainers_with_evaluations_keep_their_bytes(library: str, tmp_path: Path) -> None:
    """The validation draws random numbers, which the training must miss as it does alone."""
    pytest.importorskip(library)
    text = TRAINERS[library]
    text += "\nprint('RESULT', [value.double().sum().item() for value in model.parameters()], torch.rand(1).item())\n"
    words = [sys.executable, script(tmp_path, text=text)]
    alone, watched = run(tmp_path, *words, watched=False), run(tmp_path, *words)
    results = [[line for line in one.stdout.splitlines() if "RESULT" in line] for one in (alone, watched)]
    assert results[0] == results[1] != [], watched.stderr
    assert "only calls optimizer.step()" not in watched.stderr
    (record,) = tmp_path.rglob("summary.json")
    assert json.loads(record.read_text())["steps"] == 8


ATTACHING = """
import loopscope, sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with loopscope.attach(model, optimizer, with_hooks="minimal", out="mine", display="none"):
    for step in range(3):
        nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_scripts_that_attach_keep_their_record(tmp_path: Path) -> None:
    """The command leaves the training to the script, and reports it; verify names the cause, too."""
    watched = run(tmp_path, sys.executable, script(tmp_path, text=ATTACHING))
    assert watched.stderr == "loopscope watch: the script attaches loopscope itself, so watch adds no record.\n"
    assert (tmp_path / "mine/summary.json").exists()
    assert not (tmp_path / "loopscope-runs").exists()
    verified = subprocess.run([sys.executable, "-m", "loopscope", "verify", "mine"], cwd=tmp_path, capture_output=True)
    assert verified.returncode == 2
    assert b"recorded by a call of loopscope in its script" in verified.stderr
