"""Small trainings with one planted fault each, whose output docs/troubleshooting.md shows.

`python docs/examples/faults.py NAME` prints the output of the function NAME.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import loopscope
import torch
from loopscope import HookPoint, StepSchedule, TrainingHook
from loopscope.cli import main
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

RUN = "runs/fault"


def rows(count, seed):
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, :2].norm(dim=1) > 1.2).long()


def network(width=32):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 2))


def adam(model, lr=1e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def batches(steps, data, planted=None):
    """Yield batches of 16 rows; ``planted`` is a step and the factor of its first input, whose label becomes 0."""
    order = torch.Generator().manual_seed(2)
    for step in range(1, steps + 1):
        chosen = torch.randint(len(data[0]), (16,), generator=order)
        inputs, labels = data[0][chosen], data[1][chosen]
        if planted is not None and step == planted[0]:
            inputs[0], labels[0] = inputs[0] * planted[1], 0
        yield inputs, labels


def train(model, optimizer, steps=200, data=None, planted=None, evaluate=None, **options):
    with loopscope.attach(model, optimizer, loop="step", length=steps, out=RUN, **options) as scope:
        for step, batch in enumerate(scope.batches(batches(steps, data or rows(640, 1), planted)), start=1):
            scope.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if evaluate is not None and step % 100 == 0:
                scope.evaluate(evaluate)


def loss_does_not_fall():
    """The last layer is replaced after the optimizer was created."""
    model = network()
    optimizer = adam(model)
    model[-1] = nn.Linear(32, 2)
    train(model, optimizer, hooks=["weight_updates"], hook_options={"weight_updates": {"interval": 50}})
    main(["show", RUN, "--metrics", "weight_updates/*count", "weight_updates/update_ratio*"])


def loss_is_nan():
    """An input is infinite at step 120."""
    model, options = network(), {"weight_updates": {"interval": 1}}
    train(model, adam(model), planted=(120, float("inf")), hooks=["weight_updates"], hook_options=options)


def spike():
    """An input is 100 times too large at step 170."""
    model = network()
    train(model, adam(model), planted=(170, 100), hooks=["loss_spikes"])


def rows_of_the_spike():
    """The same training; the hook measures the rows of step 170."""
    model, at_170 = network(), StepSchedule(mode="burst", warmup=169, every_n_steps=1_000_000, burst_length=1)
    options = {"loss": loss_of, "schedules": {"batch_rows": at_170}}
    train(model, adam(model), planted=(170, 100), hooks=["batch_rows"], **options)
    main(["show", RUN, "--metrics", "batch_rows/*"])


def validation_diverges():
    """The training data are 32 rows."""
    model, data, others = network(), rows(32, 1), rows(320, 3)

    def evaluate():
        return {"train_loss": loss_of(model, data).item(), "val_loss": loss_of(model, others).item()}

    train(model, adam(model, 1e-2), 400, data, None, evaluate, hooks=["norms"], snapshot_every=100)
    main(["show", RUN, "--metrics", "training_metrics/evaluation/*", "norms/total_weight_norm"])


def costs():
    """An intervention and two observers, profiled."""
    model, loader = network(256), DataLoader(TensorDataset(*rows(640, 1)), batch_size=16)
    options = {"hooks": ["sharpness", "variance", "norms"], "hook_options": {"sharpness": {"iterations": 3}}}
    train(model, adam(model), steps=20, **options, loss=loss_of, loader=loader, profile_hooks=True)
    for name, cost in json.loads(Path(RUN, "summary.json").read_text())["hook_profile"].items():
        size = f"{cost['state_bytes'] / 1e6:.1f} MB kept, {cost['peak_bytes'] / 1e6:.1f} MB in a call"
        print(f"{name}: {cost['calls']} calls, {cost['seconds']:.2f} s, {size}")


def numbers_differ():
    """An evaluation in train mode draws the masks of dropout."""
    for kind in ("without hooks", "with hooks", "without hooks and evaluation"):
        model = nn.Sequential(network(), nn.Dropout(0.1))
        optimizer, data = adam(model), rows(640, 1)
        scope = None
        if kind == "with hooks":
            scope = loopscope.attach(model, optimizer, hooks=["norms"], out=RUN, display="none")
        loader = batches(20, data)
        for step, batch in enumerate(scope.batches(loader) if scope else loader, start=1):
            loss = loss_of(model, batch)
            scope.backward(loss) if scope else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 10 and kind == "without hooks":
                loss_of(model, data)
            if step == 10 and kind == "with hooks":
                scope.evaluate(loss_of, model, data)
        if scope:
            scope.close()
        print(f"{kind}: {sum(parameter.sum() for parameter in model.parameters()).item():.6f}")


def hook_left_out():
    """A group is attached to a loop without a loss function and a loader."""
    model = network()
    train(model, adam(model), with_hooks="observers")


class Centre(TrainingHook):
    """Measure the mean of the weights, and subtract it."""

    name = "centre"
    hook_points = frozenset({HookPoint.POST_STEP})
    metrics = "mean | mean of the weights | (−∞, ∞) | Near 0."

    def compute(self, ctx):
        weight = ctx.model[0].weight
        mean = weight.mean()
        weight.data -= mean
        return {"mean": mean}


def state_mutation():
    """An observer writes to the weights."""
    model = network()
    train(model, adam(model), hooks=[Centre])


def hang():
    """The first of several ranks evaluates alone; run it by torchrun."""
    distributed.init_process_group("gloo", timeout=timedelta(seconds=5))
    model = DistributedDataParallel(network())
    optimizer = adam(model)
    with loopscope.attach(model, optimizer, hooks=["norms"], out=RUN) as scope:
        for batch in scope.batches(batches(5, rows(640, 1))):
            scope.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if distributed.get_rank() == 0:
            scope.evaluate(lambda: {"val_loss": 0.5})


def resume_refused():
    """A second run is started in the folder of the first."""
    model = network()
    train(model, adam(model), steps=20, hooks=["norms"], display="none")
    train(model, adam(model), steps=20, hooks=["norms"])


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]]()
    except loopscope.LoopscopeError as error:
        print(f"{type(error).__name__}: {error}")
