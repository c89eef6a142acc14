"""The training in a hand-written loop, with hand-written extras."""

from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.benchmarks.others.work import DECAY, MAX_NORM, Asked, Seen, Work, norm_of_each

LOGS = "a list"
CLIPS, AVERAGES, NORMS = "clip_grad_norm_", "AveragedModel", "one _foreach_norm"


def train(work: Work, asked: Asked) -> None:
    """Train, with the requested extras."""
    model, optimizer = work.model, work.optimizer
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) if asked.averages else None
    callbacks = [*asked.callbacks, *[norm_of_each] * asked.norms]
    if asked.receives_all_events:
        callbacks.append(lambda seen: {})
    logged = []
    for _ in range(work.epochs):
        for inputs, targets in work.data:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            if asked.clips:
                clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            if average is not None:
                average.update_parameters(model)
            if callbacks:
                seen = Seen(model, loss.detach(), optimizer.param_groups[0]["lr"])
                for callback in callbacks:
                    logged.append(callback(seen))
