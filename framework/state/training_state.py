"""The one list of everything that the rest of a run depends on: a table of parts, each with all that is done to it.

The guardian copies the parts, the tripwire watches them, the audit and the tests of bit identity digest them, and
checkpoints store them. All walk :data:`PARTS` and know nothing else of a run: what is added here is known to all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ..errors import listed
from ..registry import qualified
from .accelerators import refuse_unprotected
from .digest import described, digest
from .model_parts import MODEL_PARTS, device_of
from .parts import Guarded, Leaves, Part, StateObjects, Stored, Watched, leaves_of, nested, with_types
from .random_streams import from_plain, plain
from .sharding import FullSharding
from .structure import Structure
from .tensor_identity import inner_tensors
from .update_parts import UPDATE_PARTS, extra_attributes, numbers_missing, optimizers_of

Item = TypeVar("Item")


def _watch_flags(state: StateObjects) -> Watched:
    flags = state.flags
    known = flags.read_all()
    return Watched(
        read_values=flags.read, differences=flags.differences, restore=lambda saved: flags.restore_quick(saved, known)
    )


def _kinds(state: StateObjects, _: Any = None) -> dict[str, str]:
    """Name the classes whose states only they can read."""
    parts = {"optimizer": state.optimizer, "scheduler": state.scheduler, "scaler": state.scaler}
    return {part: "none" if owner is None else type(owner).__qualname__ for part, owner in parts.items()}


def _misfit_of_kinds(state: StateObjects, stored: Mapping[str, str]) -> str:
    for part, kind in _kinds(state).items():
        if stored.get(part) != kind:
            return f"was written with the {part} {stored.get(part)}, but this one is {kind}"
    return ""


def _scaler_state(state: StateObjects, _: Any = None) -> dict[str, Any]:
    return {} if state.scaler is None else state.scaler.state_dict()


def _load_scaler(state: StateObjects, stored: Mapping[str, Any]) -> None:
    if state.scaler is not None:
        state.scaler.load_state_dict(dict(stored))


def _misfit_of_scaler(state: StateObjects, stored: Mapping[str, Any]) -> str:
    return numbers_missing("scaler", _scaler_state(state), stored)


def _watch_scaler(state: StateObjects) -> Watched:
    attributes = {} if state.scaler is None else vars(state.scaler)
    return Watched(read_values=lambda: with_types(attributes.values()), label="the scaler") if attributes else Watched()


def _extra_states(state: StateObjects, _: Any = None) -> dict[str, dict[str, Any]]:
    return {name: extra.state_dict() for name, extra in state.extras.items()}


def _load_extras(state: StateObjects, stored: Mapping[str, Any]) -> None:
    for name, extra in state.extras.items():
        extra.load_state_dict(stored[name])


def _extra_leaves(state: StateObjects) -> Leaves:
    return chain.from_iterable(nested(name, held) for name, held in _extra_states(state).items())


def _watch_extras(state: StateObjects) -> Watched:
    if not any(_extra_states(state).values()):
        return Watched()
    twice = [[id(leaf) for _, leaf in _extra_leaves(state) if isinstance(leaf, Tensor)] for _ in range(2)]
    are_copies = twice[0] != twice[1]  # of which each call makes new ones; only the audit compares their bytes

    def read_values() -> tuple[Any, ...]:
        leaves = [leaf for _, leaf in _extra_leaves(state)]
        tensors = () if are_copies else [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        return (*chain.from_iterable(tensors), *[described(leaf) for leaf in leaves if not isinstance(leaf, Tensor)])

    return Watched(read_values=read_values, label="the state that experiment or strategy declare")


def _loop_leaves(state: StateObjects) -> Leaves:
    for name, value in vars(state.loop).items():
        if name == "batch":
            yield from leaves_of("loop/batch", value)
        else:
            yield from nested(f"loop/{name}", value.tensors if name == "pre_epoch" and value is not None else value)


def _watch_loop(state: StateObjects) -> Watched:
    return Watched(
        read_tensors=state.loop.in_flight,
        read_values=lambda: with_types(vars(state.loop).values()),
        label="the batch, the loss, accumulated gradients or the loop's counters",
    )


def _load_loop(state: StateObjects, stored: Any) -> None:
    # Checkpoints are read to the CPU; the loop goes on with these tensors themselves.
    device = device_of(state)
    vars(state.loop).update(tree_map_only(Tensor, lambda tensor: tensor.to(device), stored))


def _generator_leaves(state: StateObjects) -> Leaves:
    streams = state.streams.save()
    yield "generators/torch", (streams.torch_cpu,)  # in a tuple, like the others: it is a copy, no tensor of the state
    yield "generators/python", (streams.of_python, streams.python_gaussian)
    yield "generators/numpy", (streams.of_numpy, streams.second_gaussian)
    for index, (_, held) in enumerate((*streams.accelerators, *streams.owned)):
        yield f"generators/{index}", (held,)


def _roots(state: StateObjects, parts: Sequence[Part]) -> Iterator[Any]:
    """Yield the objects from which all that the guardian walks can be reached."""
    owners: list[Tensor] = [*state.model.parameters()]
    for part in [part.guarded for part in parts]:
        yield from part.persistent(state)
        if part.temporary is not None:
            yield from part.temporary(part.save(state, owners))


def _other_leaves(state: StateObjects, named: Iterable[tuple[str, Any]]) -> Leaves:
    """Yield the tensors that the guardian finds and no part names, such as parameters that only the optimizer has."""
    known: set[int] = set()
    for _, leaf in named:
        known.add(id(leaf))
        if isinstance(leaf, Tensor):
            known.update(map(id, inner_tensors(leaf)))
    found = [tensor for tensor in Structure(_roots(state, _NAMED)).tensors if id(tensor) not in known]
    return ((f"other tensors/{index}", tensor) for index, tensor in enumerate(found))


def _optimizer_only_parameters(state: StateObjects, _: Any = None) -> dict[str, Tensor]:
    """Return the parameters that only the optimizer has.

    The other tensors that no part names, such as a scaler's, are stored with the state of the object that holds them.
    """
    named = {*map(id, state.model.parameters())}
    found = [item for group in state.optimizer.param_groups for item in group["params"] if id(item) not in named]
    return {str(index): tensor for index, tensor in enumerate(found)}


@torch.no_grad()
def _load_others(state: StateObjects, stored: Mapping[str, Any]) -> None:
    # Copied in place, since the optimizer's groups hold the very tensors.
    present = _optimizer_only_parameters(state)
    if len(stored) != len(present):
        raise ValueError(f"{len(stored)} parameters of the optimizer alone were stored, and {len(present)} are there")
    for name, tensor in present.items():
        tensor.copy_(stored[name])


EXTRAS = Part(
    "extras",
    _extra_leaves,
    Guarded(
        save=lambda state, owners: deepcopy(_extra_states(state)),
        restore=lambda state, owners, saved: _load_extras(state, deepcopy(saved)),
    ),
    _watch_extras,
    stored=Stored(_extra_states, _load_extras),
)
_NAMED = (
    Part(
        "flags",  # not stored: they are the process's, and a run that goes on in another one has that one's
        lambda state: zip([f"flags/{name}" for name in state.flags.names], state.flags.read_all(), strict=True),
        Guarded(
            save=lambda state, owners: state.flags.read_all(),
            restore=lambda state, owners, saved: state.flags.restore(saved),
            restored_first=True,
        ),
        _watch_flags,
    ),
    Part("kinds", lambda state: (), stored=Stored(_kinds, lambda state, stored: None, _misfit_of_kinds)),
    *MODEL_PARTS,
    *UPDATE_PARTS,
    Part(
        "scaler",
        lambda state: nested("scaler", _scaler_state(state)),
        Guarded(save=lambda state, owners: state.scaler, temporary=lambda saved: (saved,)),
        _watch_scaler,
        Stored(_scaler_state, _load_scaler, _misfit_of_scaler),
    ),
    EXTRAS,
    Part(
        "loop",
        _loop_leaves,
        Guarded(save=lambda state, owners: vars(state.loop), temporary=lambda saved: (saved,)),
        _watch_loop,
        Stored(lambda state, streams: state.loop.state_dict(), _load_loop),
    ),
)
GENERATORS = Part(
    "generators",
    _generator_leaves,
    Guarded(save=lambda state, owners: state.streams.save(), restore=lambda state, owners, saved: saved.restore()),
    stored=Stored(
        lambda state, streams: plain(streams), lambda state, stored: from_plain(stored, state.streams.save()).restore()
    ),
)
OTHERS = Part(
    "other tensors",
    lambda state: _other_leaves(state, chain.from_iterable(part.leaves(state) for part in _NAMED)),
    stored=Stored(_optimizer_only_parameters, _load_others),
)
PARTS = (*_NAMED, OTHERS, GENERATORS)


@dataclass
class TrainingState(StateObjects):
    """Everything the rest of the run depends on, held by reference, and the table of its parts."""

    parts: Sequence[Part] = PARTS

    def __post_init__(self) -> None:
        """Count generators that modules hold, for stochastic rounding say, among those of the run."""
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.model.module
        refuse_unprotected({parameter.device for parameter in self.model.parameters()})
        self.sharding = FullSharding(self.model)
        held = [value for module in self.model.modules() for value in extra_attributes(module)]
        found = Structure(held, excluded={*map(id, self.model.parameters())}).natives
        # dict.fromkeys keeps each once, in order, where modules share one.
        self.streams.owned += tuple(dict.fromkeys([item for item in found if isinstance(item, torch.Generator)]))

    @property
    def roots(self) -> tuple[Any, ...]:
        """The objects from which all that the guardian walks can be reached."""
        return (*_roots(self, self.parts),)

    def leaves(self) -> list[tuple[str, Any]]:
        """Return every tensor and plain value with its name."""
        named = [leaf for part in self.parts if part is not OTHERS for leaf in part.leaves(self)]
        if OTHERS not in self.parts:
            return named
        left_out = [part.leaves(self) for part in _NAMED if part not in self.parts]
        return [*named, *_other_leaves(self, chain(named, *left_out))]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state, by name."""
        return {name: leaf for name, leaf in self.leaves() if isinstance(leaf, Tensor)}

    def names(self) -> dict[int, str]:
        """Return the names of tensors, modules and their containers by the object's id."""
        found = {id(tensor): name for name, tensor in self.tensors().items()}
        for name, module in self.model.named_modules():
            found |= {id(module): f"modules/{name}", id(vars(module)): f"modules/{name}"}
            found |= {id(item): f"modules/{name}.{key}" for key, item in vars(module).items() if isinstance(item, dict)}
        for optimizer in optimizers_of(self):
            for parameter, held in optimizer.state.items():
                found[id(held)] = f"optimizer/{found.get(id(parameter), 'unknown').removeprefix('parameters/')}"
            found[id(optimizer.state)] = "optimizer state"
        for label, owner in (("optimizer", self.optimizer), ("scheduler", self.scheduler), ("loop", self.loop)):
            if (space := getattr(owner, "__dict__", None)) is not None:
                found |= {id(owner): label, id(space): label}
        return found

    def out_of_reach(self) -> str:
        """Return a sentence that names what keeps a state that nobody can ask for; empty if nothing does."""
        found = Structure(self.roots).opaque
        if not found:
            return ""
        names = {id(item): inner for name, leaf in self.leaves() for inner, item in _nested_items(name, leaf)}
        objects = [f"{names.get(id(item), 'what a hook holds')} is a {qualified(type(item))}" for item in found]
        return (
            f"{listed(objects, 3)}: the state of such an object is out of reach, so it can neither be rolled back nor "
            "watched. Keep tensors, arrays, numbers or objects of these there, or, if no later step reads what it "
            "holds, call loopscope.state.Transient.register on its class."
        )

    def digest(self, parts: Sequence[Part] = ()) -> dict[str, int]:
        """Return a 64-bit digest of every byte of the state, or of some parts, entry by entry."""
        leaves = chain.from_iterable([part.leaves(self) for part in parts]) if parts else self.leaves()
        return {name: digest(leaf) for name, leaf in leaves}


def _nested_items(name: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    yield name, leaf
    for index, item in enumerate(leaf) if isinstance(leaf, (list, tuple)) else ():
        yield from _nested_items(f"{name}/{index}", item)


def differing(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Name the entries of two digests that differ, or that only one of them has."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


ON_DEMAND = (
    *("gradient_sum", "gradient_steps", "accumulated_grads", "prev_step_grads", "current_grads"),
    *("step_series", "series_steps", "pre_epoch"),
)


def without_on_demand(entries: Mapping[str, Item]) -> dict[str, Item]:
    """Leave out of entries what the loop keeps only because a hook asked for it: the rest is equal in every run."""
    wanted = tuple(f"loop/{name}" for name in ON_DEMAND)
    return {name: value for name, value in entries.items() if not name.startswith(wanted)}
