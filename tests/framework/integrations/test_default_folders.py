"""Default folders of attached runs: numbered, and never importable."""

import json
import subprocess
import sys
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope.errors import UnsuitableError, UsageError
from torch import nn

from tests.support.cases import some_of

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")  # about the health of such a small run
FIRST, SECOND = Path("loopscope-runs/run_0"), Path("loopscope-runs/run_1")  # in the working directory


class Refusing(loopscope.TrainingHook):
    """Refuses every run."""

    name = "refusing"
    hook_points = {loopscope.HookPoint.POST_STEP}
    metrics = "one | 1 | 1 | Nothing."

    def start(self, run):
        raise UnsuitableError("not here")

    def compute(self, ctx):
        return {}


def attached(hooks=("norms",), **options):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return loopscope.attach(model, optimizer, hooks=list(hooks), display="none", **options), model, optimizer


def train(scope, model, optimizer, steps=2):
    for batch in scope.batches([torch.ones(8, 4)] * steps):
        scope.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_second_run_gets_next_number():
    for folder in (FIRST, SECOND):
        scope, *training = attached()
        train(scope, *training)
        scope.close()
        assert scope.folder == folder.absolute()
        assert (folder / "summary.json").is_file()


def test_simultaneous_runs_get_different_folders():
    """Both scopes see the same free number when they attach; the folder is taken when the first step starts."""
    scopes = [attached(), attached()]
    for scope, *training in scopes:
        train(scope, *training)
    for scope, *_ in scopes:
        scope.close()
    assert {scope.folder for scope, *_ in scopes} == {FIRST.absolute(), SECOND.absolute()}
    assert all((scope.folder / f"{scope.folder.name}.jsonl").is_file() for scope, *_ in scopes)


def test_deleted_runs_do_not_free_their_numbers():
    SECOND.mkdir(parents=True)
    scope, *training = attached()
    train(scope, *training)
    scope.close()
    assert scope.folder.name == "run_2"


def test_refused_run_creates_no_folder():
    with pytest.raises(UsageError):
        attached(["no_such_hook"])
    assert not FIRST.parent.exists()


def test_run_refused_at_its_start_removes_folder():
    """A hook that refuses the run does so at the first step, when the folder has been made."""
    scope, *training = attached([Refusing()])
    with pytest.raises(UsageError, match="not here"):
        train(scope, *training)
    assert not FIRST.parent.exists()


@pytest.mark.longer
def test_resumed_run_continues_in_its_folder():
    """The number is part of the state, so a newer run in between does not matter."""
    scope, *training = attached()
    train(scope, *training)
    state = scope.state_dict()
    scope.close()
    train(*(between := attached()))
    between[0].close()
    resumed, *training = attached()
    resumed.load_state_dict(state)
    train(resumed, *training)
    resumed.close()
    assert resumed.folder == FIRST.absolute()
    steps = [json.loads(line)["step"] for line in (FIRST / "run_0.jsonl").read_text().splitlines()]
    assert (min(steps), max(steps)) == (2, 4)


def test_explicit_folder_is_used_as_given():
    scope, *training = attached(out="here")
    train(scope, *training)
    scope.close()
    again, *training = attached(out="here")
    with pytest.raises(UsageError, match="here already holds a finished run"):
        train(again, *training)
    assert not FIRST.parent.exists()


@pytest.mark.parametrize("existing", ["file", "read-only folder"])
def test_unusable_parent_is_refused_in_a_sentence(existing, monkeypatch):
    if existing == "file":
        FIRST.parent.write_text("")
    else:
        monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UsageError, match="cannot be written"):
        attached()


def test_default_folders_cannot_be_imported():
    """A folder whose name is an identifier would be a namespace package for scripts in the same folder."""
    scope, *training = attached()
    train(scope, *training)
    scope.close()
    assert [path.name.isidentifier() for path in Path().iterdir()] == [False]


TRAINERS = {
    "lightning": """
import lightning, torch, loopscope
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = lightning.Trainer(max_epochs=1, enable_model_summary=False, **options)
scope = loopscope.attach(trainer, hooks=["norms"], display="none")
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
print(scope.folder)
""",
    "hugging_face": """
import torch, transformers, loopscope
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
    def forward(self, x):
        return {"loss": self.net(x).square().mean()}
arguments = transformers.TrainingArguments("out", num_train_epochs=1, report_to=[], disable_tqdm=True, use_cpu=True)
data = [{"x": torch.randn(4)} for _ in range(8)]
trainer = transformers.Trainer(Model(), arguments, train_dataset=data)
scope = loopscope.attach(trainer, hooks=["norms"], display="none")
trainer.train()
print(scope.folder)
""",
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.trainer
@pytest.mark.parametrize("trainer", some_of(TRAINERS))
def test_trainer_script_runs_twice_in_one_folder(trainer):
    """The script's folder is the first entry of the import path, where a folder `loopscope` would hide the package."""
    Path("script.py").write_text(TRAINERS[trainer])
    for number in (0, 1):
        done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].endswith(f"loopscope-runs/run_{number}")
