"""Hooks attached to a Lightning Trainer whose module takes the optimizer steps itself, such as a GAN."""

import hashlib
import json
import logging
from typing import Any

import lightning.pytorch as lightning
import loopscope
import pytest
import torch
from loopscope.errors import UnsuitableError
from loopscope.hooks import HookPoint
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

from tests.support import ActingHook, SpyHook

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*:UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert"),  # of the health of so small a network
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Manual(lightning.LightningModule):
    """Base of modules with manual optimisation; records a digest of all weights after every batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 4))
        self.second = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.digests: list[str] = []

    def on_train_batch_end(self, *_: Any) -> None:
        tensors = (*self.parameters(), *self.buffers())
        self.digests.append(hashlib.md5(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.first.parameters(), 1e-2), torch.optim.SGD(self.second.parameters(), 1e-2)


class Gan(Manual):
    """Both networks are updated for every batch, with toggled gradients as in Lightning's example."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        self.toggle_optimizer(generator)
        generator.zero_grad()
        self.manual_backward(softplus(-self.second(self.first(torch.randn_like(batch)))).mean())
        generator.step()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(discriminator)
        discriminator.zero_grad()
        made = self.first(torch.randn_like(batch)).detach()
        self.manual_backward((softplus(-self.second(batch)) + softplus(self.second(made))).mean())
        discriminator.step()
        self.untoggle_optimizer(discriminator)


class Alternating(Manual):
    """The second network is updated for every other batch, and both schedulers step."""

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        return list(optimizers), [torch.optim.lr_scheduler.StepLR(item, 2) for item in optimizers]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for network, optimizer, scheduler in zip(
            (self.first, self.second), self.optimizers(), self.lr_schedulers(), strict=True
        ):
            if network is self.first or batch_idx % 2 == 0:
                optimizer.zero_grad()
                self.manual_backward(network(batch).square().mean())
                optimizer.step()
                scheduler.step()


class Accumulating(Manual):
    """One optimizer, and gradients that the module accumulates over two batches."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.second(self.first(batch)).square().mean() / 2)
        if batch_idx % 2 == 1:
            self.optimizers().step()
            self.optimizers().zero_grad()


MODULES = {kind.__name__: kind for kind in (Gan, Alternating, Accumulating)}


def fit(kind: str, path: Any, **options: Any) -> Manual:
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=path, **quiet)
    if options:
        loopscope.attach(trainer, out=path / "run", display="none", overwrite=True, **options)
    module = MODULES[kind]()
    trainer.fit(module, DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(3)), 4))
    return module


def misbehave(run_ctx: Any, model_ctx: Any) -> None:
    """Change weights and draw random numbers."""
    next(run_ctx.model.parameters()).data.zero_()
    torch.randn(3)


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("kind", MODULES)
def test_manual_optimisation_keeps_its_bits(tmp_path, kind):
    """The weights after every batch are those of the Trainer without hooks."""
    hooks = ["norms", "weight_updates", "gradient_flow", "path_length", ActingHook(misbehave)]
    assert fit(kind, tmp_path, hooks=hooks).digests == fit(kind, tmp_path).digests


@pytest.mark.some_rows(3)
@pytest.mark.parametrize(("kind", "steps"), [("Gan", 12), ("Alternating", 12), ("Accumulating", 6)])
def test_batch_with_updates_is_one_step(tmp_path, kind, steps):
    """Every point fires once for each batch, or each group of batches, in which the module steps optimizers."""
    hook = SpyHook()
    hook.hook_points = frozenset(
        {HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE, HookPoint.POST_STEP}
    )
    fit(kind, tmp_path, hooks=[hook])
    points = ("PRE_STEP", "POST_BACKWARD", "PRE_UPDATE", "POST_STEP")
    assert [(point, step) for point, _, step in hook.seen] == [(p, s) for s in range(1, steps + 1) for p in points]


def test_hooks_with_losses_need_a_function(tmp_path):
    """Hooks that compute losses are refused by name, left out of groups, and work with loss=."""
    with pytest.raises(
        UnsuitableError, match=r"'hessian' computes losses; Gan sets automatic_optimization to False.*loss="
    ):
        fit("Gan", tmp_path, hooks=["hessian"])
    fit("Gan", tmp_path, with_hooks="full")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "give loss=function" in summary["hooks_left_out"]["hessian"]

    def loss(module: Any, batch: Any) -> Any:
        return module.second(module.first(batch)).square().mean()

    watched = fit("Gan", tmp_path, hooks=["hessian"], loss=loss)
    assert watched.digests == fit("Gan", tmp_path).digests
    assert "hessian/update_curvature" in loopscope.read_run(tmp_path / "run").names


def test_record_of_manual_optimisation(tmp_path):
    """The record names both optimizers; the loss is that of the backward passes before the first step."""
    fit("Gan", tmp_path, hooks=["norms"])
    training = json.loads((tmp_path / "run" / "experiment_config.json").read_text())["training"]
    assert training["optimizer"] == "Adam and SGD"
    assert loopscope.read_run(tmp_path / "run").frame("training_metrics/loss").notna().any().all()


def test_optimizer_with_closure_is_refused(tmp_path, monkeypatch):
    """LBFGS is refused by name, also as the second optimizer."""
    both = lambda module: (
        torch.optim.SGD(module.first.parameters(), 0.1),
        torch.optim.LBFGS(module.second.parameters()),
    )
    monkeypatch.setattr(Gan, "configure_optimizers", both)
    with pytest.raises(Exception, match="LBFGS evaluates the loss within its step"):
        fit("Gan", tmp_path, hooks=["norms"])
