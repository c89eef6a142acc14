"""Offload of hook state to the CPU between calls, without other effects."""

import pytest
import torch
from loopscope.engine.hook_set import StateOffload
from loopscope.hooks import HookPoint, TrainingHook

from tests.support import Case, Mishap, train

META = torch.device("meta")


class Remembering(TrainingHook):
    """Remembers the last loss, and records the device of this state in each call."""

    name = "remembering"
    hook_points = frozenset({HookPoint.POST_STEP})

    def __init__(self) -> None:
        self.state = {"nested": [{"last": torch.zeros(3)}], "count": 0}
        self.devices: list[str] = []

    def last(self) -> torch.Tensor:
        return self.state["nested"][0]["last"]

    def compute(self, ctx):
        self.devices.append(self.last().device.type)
        self.state["nested"][0]["last"] = ctx.loss.repeat(3)
        self.state["count"] += 1
        return {"last": self.last()[0]}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)

    def describe_metrics(self):
        return []


def test_state_is_offloaded_after_a_call():
    hook = Remembering()
    assert StateOffload(META).call(hook, lambda: hook.last().device.type) == "cpu"
    assert hook.last().device == META
    assert hook.state["count"] == 0


def test_offloaded_state_returns_for_the_next_call():
    """The state is back on its own device, even in nested containers."""
    hook, offload = Remembering(), StateOffload(META)
    hook.state["nested"][0]["last"] = torch.zeros(3, device=META)
    offload.call(hook, lambda: None)
    hook.state["nested"][0]["last"] = torch.zeros(3)
    assert offload.call(hook, lambda: hook.last().device.type) == "meta"


def test_state_is_offloaded_after_hook_raises():
    hook = Remembering()

    def fail() -> None:
        raise Mishap

    with pytest.raises(Mishap):
        StateOffload(META).call(hook, fail)
    assert hook.last().device == META


def test_offloaded_run_reports_the_same_numbers():
    resident, offloaded = Remembering(), Remembering()
    runs = [train(Case(), [resident]), train(Case(), [offloaded], offload_state=True)]
    assert runs[0].sink.rows() == runs[1].sink.rows()
    assert resident.state["count"] == offloaded.state["count"] == 3
    assert offloaded.state is not resident.state
