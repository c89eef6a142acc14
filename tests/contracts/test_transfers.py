"""A call of an observer reads from the device at most once, however many metrics it reports."""

import pytest
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.hooks import HookRegistry, InterventionHook

from tests.contracts.test_hooks import HEALTH, make, reference, refusal
from tests.support import CASES, train
from tests.support.transfers import count_transfers

pytestmark = pytest.mark.filterwarnings(f"ignore:{HEALTH}")
OBSERVERS = [hook.name for hook in HookRegistry if not issubclass(hook, InterventionHook)]
EPOCHS = [case for case in CASES if (case.optimizer, case.loop) == ("adamw_foreach", "epoch")]
MEASURED = {"train_loss": 1.0, "val_loss": 1.0, "train_acc": 0.5, "val_acc": 0.5}


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("case", EPOCHS, ids=str)
@pytest.mark.parametrize("name", OBSERVERS)
def test_observer_call_reads_device_at_most_once(name, case):
    """The cases are all models with AdamW in the epoch loop, except those that a hook refuses."""
    if refusal(name, case):
        pytest.skip("the hook does not support the model")
    hook = make(name)
    counts = count_transfers(hook)
    train(case, [hook], steps=6, audit=False, every_step=False, evaluate=lambda model: dict(MEASURED),
          reference_weights=reference(case))  # fmt: skip
    assert counts
    assert max(counts) <= 1
