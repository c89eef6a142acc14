"""Random streams of a new process, which no public entry point of loopscope changes."""

import subprocess
import sys
from pkgutil import iter_modules

import loopscope
import pytest

from tests.support.cases import slow_unless
from tests.support.processes import own_process

CHECK = """
import random, sys
import numpy, torch
torch.manual_seed(1), numpy.random.seed(1), random.seed(1)

def streams():
    numpy_state = numpy.random.get_state()
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2:], torch.get_rng_state().tolist()

def check(where):
    assert streams() == before, f"{where} moved a random stream"

class Drawing(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.ones(4) * index

def made():
    with torch.random.fork_rng():
        model = torch.nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), 0.1)

before = streams()
"""
MODULES = sorted(f"loopscope.{info.name}" for info in iter_modules(loopscope.__path__) if info.name != "__main__")
NAMES = sorted(loopscope.__all__)

LOOP = """
import loopscope
model, optimizer = made()
check("importing")
hooks = dict(with_hooks="minimal", hooks=["norms", "hessian"])
scope = loopscope.attach(model, optimizer, **hooks, loss=lambda model, batch: model(batch).square().mean(),
                         evaluate=lambda model: {"val_loss": 1.0}, loader=torch.utils.data.DataLoader(Drawing()),
                         sinks=["jsonl", "csv", "tensorboard"], display=DISPLAY)
check("attach")
for batch in scope.batches([torch.ones(8, 4), torch.ones(8, 4)]):
    check("a batch")
    scope.backward(model(batch).square().mean())
    check("backward")
    optimizer.step()
    optimizer.zero_grad()
    check("a step")
scope.evaluate(lambda: {"val_loss": float(torch.rand(()))})
check("evaluate")
scope.last_metrics(), scope.hooks, scope.state_dict()
import rich
rich.print(scope, file=sys.stderr)
check("showing the scope")
scope.epoch_end(val_loss=0.5)
scope.close()
check("close")
"""

SCRIPTS = {
    "import": "import loopscope\ncheck('import loopscope')",
    "names": f"import loopscope\nfor name in {NAMES}: getattr(loopscope, name); check(name)",
    "star": "from loopscope import *\ncheck('from loopscope import *')",
    "loop": LOOP.replace("DISPLAY", "'normal'"),
    "refused attach": """
import loopscope
for hooks in (["no_such_hook"], ["hessian"]):
    try: loopscope.attach(*made(), hooks=hooks)
    except loopscope.UsageError: check(f"a refusal of {hooks}")
    else: raise AssertionError("not refused")
""",
    "session": """
from loopscope.runs import RunOptions, Session
from loopscope.experiments.mod_arithmetic.runner import ModArithmeticConfig, ModArithmeticRunner
check("importing")
tiny = dict(p=5, train_size=10, test_size=10, batch_size=5, embed_dim=8, num_heads=2, layers=1, ff_dim=8, max_epochs=1)
options = RunOptions(strategies=["stride"], with_hooks="minimal")
session = Session(ModArithmeticRunner(ModArithmeticConfig(**tiny)), options)
check("making a session")
session.planned()
check("planning")
session.run()
check("running")
""",
    "command line": """
import warnings
from loopscope.__main__ import PACKAGES
from loopscope.cli import main
tiny = "--p 5 --train-size 10 --test-size 10 --batch-size 5 --embed-dim 8 --num-heads 2 --layers 1 --ff-dim 8"
run = f"run mod_arithmetic --strategy stride {tiny} --max-epochs 1 --with-hooks minimal --hook-csv"
place = "output/mod_arithmetic/stride"
for command in ("--help", "hooks", "hooks norms", run, "ls", f"show {place}", "run no_such_experiment",
                f"plot {place} --metrics training_metrics/loss", f"report {place}"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(command.split(), packages=PACKAGES)
    check(command)
""",
}
TRAINERS = {
    "lightning": """
import lightning
random.seed(1)  # importing lightning draws; that is the script's own import
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = made()[0]
    def training_step(self, batch, index): return self.net(batch).square().mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = lightning.Trainer(max_epochs=1, enable_model_summary=False, **options)
check("making the trainer")
import loopscope
loopscope.attach(trainer, with_hooks="observers")
check("attach")
""",
    "hugging face": """
import transformers
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = made()[0]
    def forward(self, x): return {"loss": self.net(x).square().mean()}
arguments = transformers.TrainingArguments("out", num_train_epochs=1, report_to=[], disable_tqdm=True, use_cpu=True)
trainer = transformers.Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(4)}] * 8)
random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
import loopscope
loopscope.attach(trainer, with_hooks="observers")
check("attach")
""",
}


def run(code, folder):
    done = subprocess.run([sys.executable, "-c", CHECK + code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("entry", SCRIPTS)
def test_entry_point_leaves_streams_unchanged(entry, tmp_path):
    run(SCRIPTS[entry], tmp_path)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.trainer
@pytest.mark.parametrize(
    "trainer", [pytest.param(trainer, marks=slow_unless(trainer == "hugging face")) for trainer in TRAINERS]
)
def test_attach_to_trainer_leaves_streams_unchanged(trainer, tmp_path):
    run(TRAINERS[trainer], tmp_path)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_importing_a_module_leaves_streams_unchanged(module, tmp_path):
    """Each module is imported first in a new process, since only the first import of rich draws."""
    run(f"import {module}\ncheck('importing')", tmp_path)


@own_process
def test_streams_are_restored_after_an_error():
    """In a separate process, since threads that other tests left behind would keep the streams from being restored."""
    error = """
from loopscope.preserved_streams import preserved_streams
try:
    with preserved_streams():
        random.random(), numpy.random.rand(), torch.rand(1)
        assert streams() != before
        raise ZeroDivisionError
except ZeroDivisionError:
    check("an error")
else:
    raise AssertionError("the error is lost")
"""
    exec(CHECK + error, {})
