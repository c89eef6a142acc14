"""The forward calls of a layer: what their casts drew and were scaled by, so that a call can be repeated."""

from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from ..errors import LoopscopeError
from .casts import Cast, Counts
from .recipes import Recipe
from .roles import ROLES, Role

SEEDS = 2**62
_numbers = count(1)


@dataclass(frozen=True)
class LayerCall:
    """One forward call of a layer.

    Args:
        number: tells it from every other call of this process; 0 if another call would cast alike.
        seed: of the random numbers of its casts.
        with_gradient: autograd recorded it.
        earlier: by role, the largest magnitude that a rule with a history was given.
        counted: what its forward casts lost, by role and cast, if that was counted.
        repeated: it is the recomputation of that call by activation checkpointing.
    """

    number: int = 0
    seed: int = 0
    with_gradient: bool = False
    earlier: dict[str, Tensor] = field(default_factory=dict)
    counted: dict[tuple[Role, Cast], Counts] = field(default_factory=dict)
    repeated: bool = False

    def mark(self) -> Tensor | None:
        """Return the number, if there is one, as a tensor: checkpointing brings that of the recomputation."""
        return torch.tensor(self.number) if self.number else None

    def is_marked(self, mark: Tensor | None) -> bool:
        """Tell whether a mark is that of this call."""
        return mark is None or int(mark) == self.number

    def generator(self, role: Role, device: torch.device) -> torch.Generator:
        """Return a fresh generator for the cast of one matrix."""
        return torch.Generator(device).manual_seed(self.seed + ROLES.index(role))


class Calls:
    """Holds the newest call of each part of a layer until its backward pass; between steps nobody needs it."""

    def __init__(self) -> None:
        self.newest: dict[str, LayerCall] = {}

    def begin(self, part: str, recipe: Recipe, generator: torch.Generator) -> LayerCall:
        """Return the call that begins: a new one, or under recomputation the newest one again.

        A forward within a backward pass is a recomputation. Raises :class:`LoopscopeError` where it cannot be repeated.
        """
        within_backward = torch._C._current_graph_task_id() != -1
        if not recipe.draws and not recipe.varies:
            return LayerCall(repeated=within_backward)
        if within_backward and part in self.newest:
            newest = self.newest[part]
            if recipe.varies and not newest.with_gradient:
                raise LoopscopeError(
                    "Reentrant activation checkpointing cannot repeat stochastic rounding or delayed scaling of a "
                    "low-bit layer's forward pass; pass use_reentrant=False to torch.utils.checkpoint."
                )
            return replace(newest, repeated=True)
        seed = int(torch.randint(SEEDS, (), generator=generator)) if recipe.draws else 0
        number = next(_numbers) if recipe.varies else 0
        call = self.newest[part] = LayerCall(number, seed, torch.is_grad_enabled())
        return call
