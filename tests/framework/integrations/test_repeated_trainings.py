"""Trainers that train several times: a separate run for each training, and the status of pruned trials."""

import json
import shutil
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from transformers import TrainerCallback

from tests.framework.integrations import test_lightning as fits
from tests.framework.integrations.hf_trainers import attached, model, trainer

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class TrialPruned(Exception):
    """An exception of the name that Optuna uses."""


class Pruner(TrainerCallback):
    """Ends every training after its second step, as a search does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step == 2:
            raise TrialPruned


def statuses(parent: Path) -> dict[str, str]:
    """Return the statuses of the runs in a folder, by name."""
    return {path.parent.name: json.loads(path.read_text())["status"] for path in parent.glob("*/summary.json")}


def test_each_training_has_a_numbered_run(tmp_path: Path) -> None:
    made = trainer(tmp_path / "t", num_train_epochs=1)
    scope = loopscope.attach(made, hooks=["norms"], display="none")
    for number in range(3):
        made.train()
        assert scope.folder.name == f"run_{number}"
        assert scope.last_metrics()
    assert statuses(scope.folder.parent) == dict.fromkeys(["run_0", "run_1", "run_2"], "completed")


def test_later_trainings_number_the_given_folder(tmp_path: Path) -> None:
    """An instance of a hook measures each training from the start."""
    hook = loopscope.hooks.HookRegistry.get("weight_updates")()
    made = trainer(tmp_path / "t", num_train_epochs=1)
    loopscope.attach(made, hooks=[hook], display="none", out=tmp_path / "run")
    for _ in range(2):
        made.train()
    assert statuses(tmp_path) == {"run": "completed", "run_2": "completed"}


def test_pruned_trial_is_not_failed(tmp_path: Path) -> None:
    made = trainer(tmp_path / "t", num_train_epochs=1)
    made.add_callback(Pruner())
    loopscope.attach(made, hooks=["norms"], display="none", out=tmp_path / "run")
    for _ in range(2):
        with pytest.raises(TrialPruned):
            made.train()
    assert statuses(tmp_path) == {"run": "interrupted", "run_2": "interrupted"}


def prune_in_a_loop(out: Path) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with loopscope.attach(net, optimizer, out=out, display="none") as scope:
        for batch in scope.batches([torch.ones(3, 2)] * 2):
            scope.backward(net(batch).sum())
            optimizer.step()
            raise TrialPruned


def test_pruned_custom_loop_is_not_failed(tmp_path: Path) -> None:
    with pytest.raises(TrialPruned):
        prune_in_a_loop(tmp_path / "run")
    assert statuses(tmp_path) == {"run": "interrupted"}


def test_search_trains_every_trial_with_hooks(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    made = trainer(tmp_path / "t", num_train_epochs=1, eval_strategy="epoch")
    made.model_init = lambda trial=None: model()
    scope = loopscope.attach(made, with_hooks="health", display="none")
    space = {"hp_space": lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)}}
    made.hyperparameter_search(n_trials=2, backend="optuna", direction="minimize", **space)
    assert statuses(scope.folder.parent) == {"run_0": "completed", "run_1": "completed"}


def test_second_fit_of_lightning_has_a_run(tmp_path: Path) -> None:
    _, scope, made = fits.fit(tmp_path, fits.OBSERVERS)
    torch.manual_seed(1)
    made.fit_loop.epoch_progress.reset()
    made.fit(fits.Classifier(), fits.batches(shuffle=True))
    assert scope.folder == tmp_path / "run_2"
    assert statuses(tmp_path) == {"run": "completed", "run_2": "completed"}


def test_tuner_before_a_fit_leaves_one_run(tmp_path: Path) -> None:
    made = fits.trainer(tmp_path)
    loopscope.attach(made, hooks=fits.OBSERVERS, display="none", out=tmp_path / "run")
    module = fits.Classifier()
    module.learning_rate = 0.01
    fits.lightning.tuner.Tuner(made).lr_find(module, fits.batches(), num_training=5)
    made.fit(module, fits.batches())
    assert statuses(tmp_path) == {"run": "completed"}


@pytest.mark.some_rows(3)
@pytest.mark.filterwarnings("always::loopscope.errors.RunNotice")
@pytest.mark.parametrize("place", ["another", "deleted", "of another run"])
def test_checkpoint_resumes_into_a_new_record(tmp_path: Path, place: str, recwarn: Any) -> None:
    """The restored state of the hooks continues; the record of the other run starts after the checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}
    first = trainer(tmp_path / "t", **saving)
    attached(first, ["norms", "weight_average"], out=tmp_path / "first")
    first.train()
    if place == "deleted":
        shutil.rmtree(tmp_path / "first")
    out, options = tmp_path / ("first" if place == "deleted" else "second"), {}
    if place == "of another run":
        options["overwrite"] = True
        attached(other := trainer(tmp_path / "other", num_train_epochs=1), ["norms"], out=out)
        other.train()
    later = trainer(tmp_path / "t", **saving)
    scope = attached(later, ["norms", "weight_average"], out=out, **options)
    later.train(resume_from_checkpoint=str(tmp_path / "t/checkpoint-2"))
    assert any("so a new record starts after step 2, with the rest" in str(item.message) for item in recwarn)
    assert statuses(tmp_path)[out.name] == "completed"
    steps = [json.loads(line).get("step", 3) for line in (scope.folder / f"{out.name}.jsonl").open()]
    assert min(steps) > 2
