"""Batches that are not tuples of tensors, and a loader of them."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from loopscope.data import Loader
from torch import Tensor

ROWS = 8


@dataclass
class Fields:
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Slots:
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


class Graph:
    """An object in the style of graph libraries: it stores its data one level deeper, and refers to itself."""

    def __init__(self, x: Any, y: Any) -> None:
        self._store = {"x": x, "y": y, "parent": self}

    @property
    def x(self) -> Any:
        return self._store["x"]

    @property
    def y(self) -> Any:
        return self._store["y"]


class Opaque:
    """An object whose data are unreachable."""

    def __init__(self, x: Any, y: Any) -> None:
        self.read = lambda: (x, y)


Pair = namedtuple("Pair", "x y")
KINDS: dict[str, Any] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "nested": lambda x, y: [{"x": [x]}, {"y": (y,)}],
    "UserDict": lambda x, y: UserDict(x=x, y=y),
    "OrderedDict": lambda x, y: OrderedDict(x=x, y=y),
    "named": Pair,
    "dataclass": Fields,
    "slots": Slots,
    "frozen": Frozen,
    "object": Graph,
    "arrays": lambda x, y: {"x": x.numpy(), "y": y.numpy()},
    "nested arrays": lambda x, y: [{"x": [x.numpy()]}, {"y": (y.numpy(),)}],
    "tuple": lambda x, y: (x, y),
    "encoding": lambda x, y: encoding(x=x, y=y),
}


def encoding(**data: Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(data)


def parts(batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch of any kind."""
    if isinstance(batch, Opaque):
        return batch.read()
    if isinstance(batch, list):
        inputs_and_targets = batch[0]["x"][0], batch[1]["y"][0]
    elif isinstance(batch, (dict, UserDict)):
        inputs_and_targets = batch["x"], batch["y"]
    else:
        inputs_and_targets = batch if type(batch) is tuple else (batch.x, batch.y)
    return tuple(torch.as_tensor(part) for part in inputs_and_targets)


class Views(Loader):
    """A loader of views of the data, in containers of a kind; with ``kept`` every epoch yields the same objects."""

    def __init__(
        self, kind: str, *, kept: bool = False, data: tuple[Tensor, Tensor] | None = None, size: int = 4
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(ROWS, 3, generator=generator), torch.randint(2, (ROWS,), generator=generator)
        self.data, self.size = data or drawn, size
        self._make = {**KINDS, "opaque": Opaque}[kind]
        self._kind, self._kept = kind, [*self._made()] if kept else None

    def _made(self) -> Iterator[Any]:
        return map(self._make, *(part.split(self.size) for part in self.data))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        yield from [*(self._kept or self._made())][start:]

    def __len__(self) -> int:
        return -(-len(self.data[0]) // self.size)

    def shuffled(self, seed: int) -> Loader:
        order = torch.randperm(len(self.data[0]), generator=torch.Generator().manual_seed(seed))
        return Views(self._kind, data=tuple(part[order] for part in self.data), size=self.size)
