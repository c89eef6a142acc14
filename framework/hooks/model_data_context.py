"""The model context: the only way in which an intervention reaches the mutable training state."""

import torch
from torch import nn

from ..state import TrainingState
from ..training import LossProbe, Profiler, TrainingTask
from .commits import CommitRecord
from .committing import Committing
from .experimenting import Experimenting


class ModelDataContext(Experimenting, Committing):
    """What an intervention may do in one call: measure, experiment, commit.

    Everything it did is rolled back when the call ends; then the commits that it asked for are made.

    Vectors are dicts from parameter names to tensors of the parameters' shapes (plain tensors or DTensors); a name
    that is missing stands for zeros. Losses, gradients and curvature are those of the training loss in the model's
    present modes. What measuring them needs (buffers, modes, gradients, random streams) is borrowed and put back, so
    that two measurements in one call see the same dropout mask.
    """

    def __init__(
        self,
        task: TrainingTask,
        state: TrainingState,
        commits: CommitRecord,
        parameters: list[nn.Parameter],
        *,
        mutates: bool,
        device: torch.device | None,
        stream: tuple[str, str, int],
        loop: str,
        profiler: Profiler | None = None,
    ) -> None:
        """Serve one call.

        Args:
            task: what is trained.
            state: the training state.
            commits: takes what the hook asks to keep.
            parameters: those of the model, in its order, which nobody then needs to walk through again.
            mutates: whether the hook declares that it changes the state.
            device: where full checkpoints live; ``None``: where the state does.
            stream: the (name, point, step) of the call's random stream.
            loop: the loop's type.
            profiler: counts the passes through the model.
        """
        self._task = task
        self._state = state
        self._commits = commits
        self._parameters = parameters
        self._mutates = mutates
        self._snapshot_device = device
        self._stream = stream
        self._steps_scheduler = loop == "step" or task.scheduler_interval == "step"
        self._profiler = profiler or Profiler()
        self._probe = LossProbe(task, state, self._profiler)
        self._checkpoints = {}
