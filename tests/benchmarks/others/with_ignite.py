"""The training in PyTorch Ignite, with handlers."""

from functools import partial

from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import EMAHandler
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from tests.benchmarks.others.work import DECAY, MAX_NORM, Asked, Batch, Callback, Seen, Work, norm_of_each

LOGS = "engine.state.metrics, in memory"
CLIPS, AVERAGES, NORMS = "clip_grad_norm_ in the step", "EMAHandler", "a handler"


def train(work: Work, asked: Asked) -> None:
    """Train, with the requested extras."""
    model, optimizer = work.model, work.optimizer
    if asked.clips:
        engine = Engine(partial(_clipped, work))
    else:
        engine = create_supervised_trainer(
            model, optimizer, functional.cross_entropy, output_transform=lambda x, y, y_pred, loss: loss.detach()
        )
    if asked.receives_all_events:
        for event in Events:
            engine.add_event_handler(event, lambda *_: None)
    for callback in [*asked.callbacks, *[norm_of_each] * asked.norms]:
        engine.add_event_handler(Events.ITERATION_COMPLETED, _logged, work, callback)
    if asked.averages:
        EMAHandler(model, momentum=1 - DECAY).attach(engine)
    engine.run(work.data, max_epochs=work.epochs)


def _logged(engine: Engine, work: Work, callback: Callback) -> None:
    seen = Seen(work.model, engine.state.output, work.optimizer.param_groups[0]["lr"])
    engine.state.metrics.update(callback(seen))


def _clipped(work: Work, engine: Engine, batch: Batch) -> Tensor:
    """Take a step with clipping, as in the documentation."""
    model: nn.Module = work.model
    model.train()
    work.optimizer.zero_grad()
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    work.optimizer.step()
    return loss.detach()
