"""Episodes of the environments in this process: their returns, and the observations before their last steps."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_STEPS = 50_000
"""Steps whose observations are kept, the newest ones."""
MOST_NUMBERS = 512
"""Numbers of an observation that is kept; larger ones, such as images, are not."""
MOST_EPISODES = 1_000
MOST_ROWS = 4_096
"""Rows of a batch that are looked up."""


class Ended(NamedTuple):
    """A finished episode."""

    total: float
    """The sum of its rewards."""
    length: int


class FollowingStep(NamedTuple):
    """What followed an observation."""

    reward: float
    """The reward of the next step."""
    to_go: float
    """The sum of all further rewards of the episode."""
    is_last: bool
    """Whether the next step has terminated the episode; not if a limit of time has."""
    is_unique: bool
    """Whether the observation has occurred only once among those that are kept."""


class Episodes:
    """The newest episodes of all environments of a process, one step after the other."""

    def __init__(self) -> None:
        self.ended: deque[Ended] = deque(maxlen=MOST_EPISODES)
        self.count = 0
        """The number of finished episodes."""
        self.width = 0
        """Numbers of an observation; 0 before the first one that can be kept."""
        self._open: dict[int, list[tuple[bytes, float]]] = {}
        self._observed: dict[int, bytes] = {}
        self._steps: dict[bytes, FollowingStep] = {}

    def on_reset(self, environment: int, result: Any) -> None:
        """Note the first observation of an episode, which ends the one before."""
        self._end(environment, is_last=False)
        self._observed[environment] = self._key(result[0] if isinstance(result, tuple) else result)

    def on_step(self, environment: int, result: Any) -> None:
        """Note a step; ``result`` is that of gymnasium: observation, reward, terminated, truncated, information."""
        observation, reward, terminated = result[0], float(result[1]), bool(result[2])
        self._open.setdefault(environment, []).append((self._observed.get(environment, b""), reward))
        self._observed[environment] = self._key(observation)
        if terminated:
            self._end(environment, is_last=True)

    def _key(self, observation: Any) -> bytes:
        values = np.asarray(observation) if isinstance(observation, (np.ndarray, list, tuple)) else None
        if values is None or values.dtype.kind not in "fiu" or not 0 < values.size <= MOST_NUMBERS:
            return b""
        self.width = values.size
        return values.astype(np.float32).tobytes()

    def _end(self, environment: int, *, is_last: bool) -> None:
        steps = self._open.pop(environment, [])
        if not steps:
            return
        to_go = 0.0
        for key, reward in reversed(steps):
            to_go += reward
            if key:
                is_unique = key not in self._steps
                self._steps.pop(key, None)
                self._steps[key] = FollowingStep(reward, to_go, is_last, is_unique)
            is_last = False
        while len(self._steps) > MOST_STEPS:
            self._steps.pop(next(iter(self._steps)))
        self.ended.append(Ended(to_go, len(steps)))
        self.count += 1

    def ended_since(self, count: int) -> list[Ended]:
        """Return the episodes that have ended since the number of them was ``count``, at most the newest thousand."""
        newer = min(self.count - count, len(self.ended))
        return list(self.ended)[len(self.ended) - newer :] if newer > 0 else []

    def steps_of(self, observations: Tensor) -> Iterator[tuple[int, FollowingStep]]:
        """Yield the rows of a batch, shape (rows, numbers), that begin with a known observation, and what followed."""
        if not self._steps or observations.shape[1] < self.width or observations.device.type != "cpu":
            return
        rows = observations[:MOST_ROWS, : self.width].to(torch.float32).contiguous().numpy()
        for index, row in enumerate(rows):
            if (step := self._steps.get(row.tobytes())) is not None:
                yield index, step


EPISODES = Episodes()
"""Those of the environments of gymnasium in a process under ``loopscope watch``."""


def note_environment(name: str, environment: Any, result: Any) -> None:
    """Note a call of the method ``name``, ``reset`` or ``step``, of an environment, and its result."""
    note: Mapping[str, Any] = {"reset": EPISODES.on_reset, "step": EPISODES.on_step}
    note[name](id(environment), result)
