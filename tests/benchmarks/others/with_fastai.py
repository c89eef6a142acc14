"""The training in fastai, with callbacks."""

from collections.abc import Mapping
from typing import Any

from fastai.callback.core import Callback as FastaiCallback
from fastai.callback.core import event
from fastai.callback.training import GradientClip
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch.nn import functional

from tests.benchmarks.others.work import MAX_NORM, Asked, Callback, Seen, Work, norm_of_each

LOGS = "a list"
CLIPS, AVERAGES, NORMS = "GradientClip", "", "a callback"
EVENTS = [name for name in vars(event) if name.startswith(("before_", "after_"))]


class Logs(FastaiCallback):
    """Stores the results of a callback."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self.logged: list[Mapping[str, float]] = []

    def after_step(self) -> None:
        self.logged.append(self._callback(Seen(self.learn.model, self.learn.loss.detach(), self.opt.hypers[-1]["lr"])))


class HearsAll(FastaiCallback):
    """A callback with a method for every event."""


for _name in EVENTS:
    setattr(HearsAll, _name, lambda self: None)


def train(work: Work, asked: Asked) -> None:
    """Train, with the requested extras."""
    callbacks: list[Any] = [Logs(callback) for callback in [*asked.callbacks, *[norm_of_each] * asked.norms]]
    callbacks += [HearsAll()] * asked.receives_all_events
    callbacks += [GradientClip(MAX_NORM)] if asked.clips else []
    learner = Learner(
        DataLoaders(work.data, []), work.model, loss_func=functional.cross_entropy, cbs=callbacks, path=work.folder,
        opt_func=lambda parameters, lr: OptimWrapper(opt=work.optimizer), lr=work.optimizer.param_groups[0]["lr"],
    )  # fmt: skip
    with learner.no_bar(), learner.no_logging():
        learner.fit(work.epochs)
