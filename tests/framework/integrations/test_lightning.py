"""Hooks attached to Lightning's Trainer: they leave the fit unchanged and report the numbers of loopscope's loop."""

import json
import logging
import shutil
import signal
from functools import partial
from pathlib import Path

import lightning.pytorch as lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision, Precision
from loopscope import read_run
from loopscope.data import TorchLoader
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks.selection import build_hooks
from loopscope.integrations import attach
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from torch.utils.data import DataLoader, TensorDataset

from tests.support.misbehaving_hooks import spoil_accumulation
from tests.support.models import batchnorm_mlp, mean_loss
from tests.support.runs import RecordingSink
from tests.support.spies import ActingHook, SpyHook

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*:UserWarning:lightning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
OBSERVERS = ["norms", "training_metrics", "consecutive", "parameter_delta"]


class Classifier(lightning.LightningModule):
    """A small network with a scheduler, whose losses are logged and whose validation draws."""

    def __init__(self, interval="step", optimizer=torch.optim.AdamW, **options):
        super().__init__()
        self.net, self.interval, self.make = batchnorm_mlp(), interval, partial(optimizer, **{"lr": 1e-2} | options)

    def training_step(self, batch, batch_idx):
        self.log("loss", loss := mean_loss(self.net, batch), on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", mean_loss(self.net, (batch[0] + torch.randn_like(batch[0]), batch[1])))

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class Trace(lightning.Callback):
    """Records the state that the rest of a fit depends on, after every batch."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, module, *rest):
        leaves = torch.utils._pytree.tree_leaves([module.state_dict(), trainer.optimizers[0].state_dict()["state"]])
        random = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist())
        self.rows.append(([leaf.tolist() for leaf in leaves], random, trainer.optimizers[0].param_groups[0]["lr"]))


def batches(**options):
    rows = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(20, 4, generator=rows), torch.randint(0, 7, (20,), generator=rows))
    return DataLoader(data, 4, **options)


def trainer(path, **options):
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    return lightning.Trainer(**quiet | {"accelerator": "cpu", "max_epochs": 2, "default_root_dir": path} | options)


def fit(path, hooks=(), *, module=Classifier, shuffle=True, validate=False, choices=None, ckpt=None, **options):
    """Fit from the same seed; return the trace, the scope and the Trainer."""
    torch.manual_seed(1)
    model, trace, scope = module(), Trace(), None
    made = trainer(path, **options | {"callbacks": [trace, *options.get("callbacks", ())]})
    if hooks:
        scope = attach(made, hooks=list(hooks), **{"display": "none", "out": path / "run"} | (choices or {}))
    made.fit(model, batches(shuffle=shuffle), batches() if validate else None, ckpt_path=ckpt)
    return trace.rows, scope, made


def mutate_state(run, model):
    """Train on, draw, and zero the weights."""
    if run.hook_point.name in ("PRE_STEP", "POST_BACKWARD", "POST_STEP"):
        model.take_step()
    np.random.rand()
    spoil_accumulation(next(model.model.parameters()))
    with torch.no_grad():
        torch._foreach_zero_(list(model.model.parameters()))
    return {"drawn": torch.rand(())}


CASES = {
    "plain": {},
    "accumulation with a shorter last group": {"accumulate_grad_batches": 2},
    "clipped norm": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    "clipped values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bfloat16": {"precision": "bf16-mixed"},
    "scheduler of epochs": {"module": partial(Classifier, "epoch")},
}


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.trainer
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_fit_with_hooks_matches_bare_fit(options, tmp_path):
    """Weights, optimizer state, generators, learning rate and metrics are equal, even with a misbehaving hook."""
    bare, _, alone = fit(tmp_path, **options)
    with_hooks, _, attached = fit(tmp_path, [*OBSERVERS, ActingHook(mutate_state)], **options)
    assert with_hooks == bare
    assert attached.callback_metrics == alone.callback_metrics != {}


def test_audited_fit_matches_bare_fit(tmp_path):
    """The hooks include one that trains, draws random numbers and zeroes the weights."""
    hooks = ["norms", "training_metrics", "hessian", ActingHook(mutate_state)]
    audited, *_ = fit(tmp_path, hooks, max_epochs=1, choices={"audit": True})
    assert audited == fit(tmp_path, max_epochs=1)[0]


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.trainer
def test_validation_changes_only_fits_without_hooks(tmp_path):
    """With hooks attached, frequent validation leaves the fit unchanged, and the validation loop is unwrapped
    afterwards."""
    often = {"validate": True, "val_check_interval": 2}
    bare, *_ = fit(tmp_path)
    assert fit(tmp_path, **often)[0] != bare
    with_hooks, scope, made = fit(tmp_path, ["norms", ActingHook(mutate_state)], **often)
    assert with_hooks == bare
    assert "run" not in vars(made.fit_loop.epoch_loop.val_loop)  # nothing stays wrapped
    attach(made, hooks=["norms"], out=tmp_path / "second")
    assert json.loads((scope.folder / "summary.json").read_text())["final"].keys() == {"val_loss"}


@pytest.mark.slow
def test_attached_hooks_match_epoch_loop_metrics(tmp_path):
    """Hooks on the Trainer emit the same rows as hooks in the framework's epoch loop on the same task."""

    class Calm(Classifier):
        def __init__(self):
            super().__init__()
            self.net[3] = torch.nn.Identity()  # dropout masks would differ, since Lightning draws for its loader

    hooks, attached, own = ["norms", "training_metrics", "consecutive", "hessian"], RecordingSink(), RecordingSink()
    fit(tmp_path, hooks, module=Calm, shuffle=False, choices={"sinks": [attached]})
    torch.manual_seed(1)
    model, loader = Calm(), TorchLoader(batches(), 0)
    scheduler = model.configure_optimizers()["lr_scheduler"]["scheduler"]
    loss = lambda model, batch: mean_loss(model.net, batch)
    every = {"length": 2, "snapshot_every": 1, "scheduler_interval": "step", "scheduler": scheduler}
    task = TrainingTask(model, scheduler.optimizer, loader, loss, **every)
    state = TrainingState(model, scheduler.optimizer, RandomStreams(0), scheduler=scheduler)
    manager = HookManager([each.hook for each in build_hooks(hooks, {}, {}, [])], task, state, sinks=[own])
    epoch_loop(task, manager)
    manager.end("completed")
    assert attached.rows() == own.rows() != []


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.trainer
@pytest.mark.parametrize("at_the_end_of", ["epoch", "validation"])
def test_resumed_fit_has_the_same_record(at_the_end_of, tmp_path):
    """The checkpoint is saved after the training epoch or after validation; record and weights match the whole fit."""

    class Calm(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            torch.manual_seed(batch_idx)  # Lightning does not store the generators

    early = {"save_on_train_epoch_end": at_the_end_of == "epoch", "save_top_k": -1}
    saver = ModelCheckpoint(tmp_path / "kept", "{epoch}", **early)
    rest = {"module": Calm, "validate": True, "log_every_n_steps": 2}
    whole, scope, _ = fit(tmp_path, OBSERVERS, **rest, shuffle=False, callbacks=[saver], enable_checkpointing=True)
    shutil.copytree(scope.folder, tmp_path / "again" / "run")
    later, again, _ = fit(tmp_path / "again", OBSERVERS, **rest, shuffle=False, ckpt=tmp_path / "kept" / "epoch=0.ckpt")
    assert (again.folder / "run.jsonl").read_bytes() == (scope.folder / "run.jsonl").read_bytes()
    assert [row[0] for row in later] == [row[0] for row in whole[5:]]


@pytest.mark.trainer
def test_fit_resumed_within_an_epoch_has_logged_numbers(tmp_path):
    """The numbers of steps are those that Lightning logs, also at the step of the checkpoint."""

    losses = []

    class Noting(Classifier):
        def on_before_backward(self, loss):
            losses.append(loss.item())

    def logged(folder, **options):
        losses.clear()
        _, scope, _ = fit(folder, ["norms"], module=Noting, log_every_n_steps=2, **options)
        return scope.folder, read_run(scope.folder).frame("reported/*")["reported/loss_step"].to_dict()

    saver = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=2, save_top_k=-1)
    folder, whole = logged(tmp_path, callbacks=[saver], enable_checkpointing=True)
    assert whole == {step: losses[step - 1] for step in (2, 4, 6, 8, 10)}
    shutil.copytree(folder, tmp_path / "again" / "run")
    _, resumed = logged(tmp_path / "again", ckpt=tmp_path / "kept" / "step=2.ckpt")
    # The rows of its steps are others, since Lightning starts the data of the epoch again.
    assert resumed == {2: whole[2]} | {step: losses[step - 3] for step in (4, 6, 8, 10)}


@pytest.mark.parametrize(("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_a_fit_that_breaks_off_closes_the_run(error, status, tmp_path):
    class Failing(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 3:
                raise error

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises((ValueError, SystemExit)):
        fit(tmp_path, OBSERVERS, module=Failing)
    signal.signal(signal.SIGINT, handler)  # Lightning leaves SIGINT ignored
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == status


def test_epoch_cut_short_drops_its_open_step(tmp_path):
    """The module ends the epoch within an accumulated step, which visits PRE_STEP but no later step point."""

    class Cutting(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    spy, rest = SpyHook(lambda ctx: {}), {"module": Cutting, "max_epochs": 1, "accumulate_grad_batches": 2}
    assert fit(tmp_path, [spy], **rest)[0] == fit(tmp_path, **rest)[0]
    fired = "PRE_EPOCH PRE_STEP POST_BACKWARD PRE_UPDATE POST_STEP PRE_STEP POST_EPOCH SNAPSHOT"
    assert [point for point, *_ in spy.seen] == fired.split()
    assert [step for *_, step in spy.seen] == [0, 1, 1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("fused", [False, True])
def test_float16_overflow_is_a_skipped_step(fused, tmp_path):
    """The step visits no PRE_UPDATE or POST_STEP, and the summary counts it as skipped."""

    class Overflowing(Classifier):
        def on_after_backward(self):
            if self.trainer.fit_loop.total_batch_idx == 2:
                next(self.parameters()).grad.fill_(torch.inf)

    def scaled():
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        return {"plugins": [plugin], "max_epochs": 1, "module": partial(Overflowing, fused=fused)}

    spy = SpyHook(lambda ctx: {})
    with_hooks, scope, _ = fit(tmp_path, [spy, "norms", ActingHook(mutate_state)], **scaled())
    assert with_hooks == fit(tmp_path, **scaled())[0]
    assert [point for point, _, step in spy.seen if step == 3] == ["PRE_STEP", "POST_BACKWARD"]
    assert json.loads((scope.folder / "summary.json").read_text())["skipped_steps"] == 1


@pytest.mark.compile
def test_a_compiled_module_is_trained_the_same(tmp_path):
    class Silent(Classifier):
        def training_step(self, batch, batch_idx):
            return mean_loss(self.net, batch)

    compiled = lambda: torch.compile(Silent(), backend="eager")
    found, *_ = fit(tmp_path, ["hessian", ActingHook(mutate_state)], module=compiled, max_epochs=1)
    assert found == fit(tmp_path, module=Silent, max_epochs=1)[0]


def test_numbers_reach_the_loggers_of_the_trainer(tmp_path):
    logger = CSVLogger(tmp_path, "logs")
    fit(tmp_path, ["norms", "training_metrics"], logger=logger, choices={"sinks": ["trainer"], "out": None})
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert {"norms/total_grad_norm", "training_metrics/loss", "loss_epoch"} <= {*lines[0].split(",")}
    assert (Path(logger.log_dir) / "loopscope-runs/run_0/summary.json").is_file()


def test_missing_private_lightning_name_is_refused(tmp_path, monkeypatch):
    """attach raises UsageError with the missing name and a version of Lightning that works."""
    made = trainer(tmp_path)
    monkeypatch.delattr(Precision, "_clip_gradients")
    with pytest.raises(UsageError, match=r"has no Trainer\.precision_plugin\._clip_gradients.*Lightning 2\.6 has it"):
        attach(made, hooks=["norms"])


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.trainer
def test_unsupported_trainers_are_refused(tmp_path):
    """A second or late attach, ddp_spawn, FSDP, barebones mode, manual optimization and LBFGS raise UsageError."""

    def attached(made):
        return attach(made, hooks=["norms"], out=tmp_path / "run", display="none") and made

    class Late(lightning.Callback):
        def on_train_start(self, trainer, module):
            attached(trainer)

    lbfgs = partial(Classifier, optimizer=torch.optim.LBFGS)
    sharded = trainer(tmp_path)
    sharded._accelerator_connector.strategy = lightning.strategies.FSDPStrategy()
    mistakes = {
        "already attached to this Trainer": lambda: attached(attached(trainer(tmp_path))),
        "is already running": lambda: fit(tmp_path, callbacks=[Late()]),
        "ddp_spawn moves the Trainer": lambda: attached(trainer(tmp_path, devices=2, strategy="ddp_spawn")),
        "FSDPStrategy; attach supports one": lambda: attached(sharded),
        "barebones=True": lambda: attached(lightning.Trainer(accelerator="cpu", barebones=True)),
        "LBFGS evaluates the loss within its step": lambda: fit(tmp_path, ["norms"], module=lbfgs),
    }
    for sentence, mistake in mistakes.items():
        with pytest.raises(UsageError, match=sentence):
            mistake()


def test_every_validation_of_the_fit_is_recorded(tmp_path):
    """With a validation after every second step, the record has each at its step."""
    fit(tmp_path, ["norms"], validate=True, val_check_interval=2)
    name = "training_metrics/evaluation/val_loss"
    steps = [step for _, step, _, metric, _ in read_run(tmp_path / "run").points if metric == name]
    assert steps == [2, 4, 7, 9]
