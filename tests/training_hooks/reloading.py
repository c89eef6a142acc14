"""A hook whose state goes through a file before every call, as if the run were resumed at every one of its fires."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from loopscope.hooks import Metrics, RunDataContext, TrainingHook


def through_a_file(state: Mapping[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def reloading(hook_class: type[TrainingHook], **options: Any) -> TrainingHook:
    """Make a hook that computes, every time, in a new hook which has read its state from a file."""

    class Reloading(hook_class):  # type: ignore[valid-type, misc]
        def compute(self, ctx: RunDataContext) -> Metrics:
            fresh = hook_class(**options)
            fresh.load_state_dict(through_a_file(self.state_dict()))
            metrics = fresh.compute(ctx)
            self.load_state_dict(through_a_file(fresh.state_dict()))
            return metrics

    return Reloading(**options)
