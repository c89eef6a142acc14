"""The complete list of the state that the rest of a run depends on: a table of parts with their operations.

The guardian copies the parts, the tripwire watches them, the audit and the tests of bit identity digest them, and
checkpoints store them. All iterate over :data:`PARTS` and use no other description of a run, so that adding a part here
is sufficient.
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
    all_flags = flags.read_all()
    return Watched(
        read_values=flags.read,
        differences=flags.differences,
        restore=lambda saved: flags.restore_quick(saved, all_flags),
    )


def _kinds(state: StateObjects, _: Any = None) -> dict[str, str]:
    """Return the names of the classes whose state dicts only the same class can load."""
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
    return chain.from_iterable(nested(name, extra) for name, extra in _extra_states(state).items())


def _watch_extras(state: StateObjects) -> Watched:
    if not any(_extra_states(state).values()):
        return Watched()
    ids_of_two_calls = [[id(leaf) for _, leaf in _extra_leaves(state) if isinstance(leaf, Tensor)] for _ in range(2)]
    # If state_dict() returns new tensors at each call, only the audit compares their bytes.
    are_copies = ids_of_two_calls[0] != ids_of_two_calls[1]

    def read_values() -> tuple[Any, ...]:
        leaves = [leaf for _, leaf in _extra_leaves(state)]
        # Only the private _version tells whether a tensor was written to without reading its bytes.
        tensors = () if are_copies else [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        return (*chain.from_iterable(tensors), *[described(leaf) for leaf in leaves if not isinstance(leaf, Tensor)])

    return Watched(read_values=read_values, label="the declared state of experiment or strategy")


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
    # Checkpoints are read to the CPU; the loop continues with these very tensors.
    device = device_of(state)
    vars(state.loop).update(tree_map_only(Tensor, lambda tensor: tensor.to(device), stored))


def _generator_leaves(state: StateObjects) -> Leaves:
    streams = state.streams.save()
    # In a tuple, like the others: it is a copy, not a tensor of the state.
    yield "generators/torch", (streams.torch_cpu,)
    yield "generators/python", (streams.of_python, streams.python_gaussian)
    yield "generators/numpy", (streams.of_numpy, streams.second_gaussian)
    for index, (_, generator_state) in enumerate((*streams.accelerators, *streams.owned)):
        yield f"generators/{index}", (generator_state,)


def _roots(state: StateObjects, parts: Sequence[Part]) -> Iterator[Any]:
    """Yield the objects from which the guardian walks the state."""
    owners: list[Tensor] = [*state.model.parameters()]
    for part in [part.guarded for part in parts]:
        yield from part.persistent(state)
        if part.temporary is not None:
            yield from part.temporary(part.save(state, owners))


def _other_leaves(state: StateObjects, named: Iterable[tuple[str, Any]]) -> Leaves:
    """Yield tensors that the guardian finds but no part names, such as parameters that only the optimizer has."""
    named_ids: set[int] = set()
    for _, leaf in named:
        named_ids.add(id(leaf))
        if isinstance(leaf, Tensor):
            named_ids.update(map(id, inner_tensors(leaf)))
    unnamed = [tensor for tensor in Structure(_roots(state, _NAMED)).tensors if id(tensor) not in named_ids]
    return ((f"other tensors/{index}", tensor) for index, tensor in enumerate(unnamed))


def _optimizer_only_parameters(state: StateObjects, _: Any = None) -> dict[str, Tensor]:
    """Return the parameters that only the optimizer has.

    Other tensors that no part names, such as a scaler's, are stored with the state of the object that holds them.
    """
    model_ids = {*map(id, state.model.parameters())}
    parameters = [
        item for group in state.optimizer.param_groups for item in group["params"] if id(item) not in model_ids
    ]
    return {str(index): tensor for index, tensor in enumerate(parameters)}


@torch.no_grad()
def _load_others(state: StateObjects, stored: Mapping[str, Any]) -> None:
    # Copied in place, since the optimizer's groups refer to these tensors.
    present = _optimizer_only_parameters(state)
    if len(stored) != len(present):
        raise ValueError(
            f"{len(stored)} parameters that only the optimizer has were stored, but this optimizer has {len(present)}"
        )
    for name, tensor in present.items():
        tensor.copy_(stored[name])


EXTRAS = Part(
    "extras",
    _extra_leaves,
    Guarded(
        save=lambda state, owners: deepcopy(_extra_states(state)),
        # Copied again, since load_state_dict may keep what it gets, and one snapshot is restored several times.
        restore=lambda state, owners, saved: _load_extras(state, deepcopy(saved)),
    ),
    _watch_extras,
    stored=Stored(_extra_states, _load_extras),
)
_NAMED = (
    Part(
        "flags",  # not stored: they belong to the process, and a resumed run uses those of the new process
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
    """References to everything that the rest of the run depends on, and the table of parts."""

    parts: Sequence[Part] = PARTS

    def __post_init__(self) -> None:
        """Add random generators of modules, such as for stochastic rounding, to the run's generators."""
        # The inner module: DDP's reducer keeps state in C++, which no rollback restores.
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.model.module
        refuse_unprotected({parameter.device for parameter in self.model.parameters()})
        self.sharding = FullSharding(self.model)
        attributes = [value for module in self.model.modules() for value in extra_attributes(module)]
        natives = Structure(attributes, excluded={*map(id, self.model.parameters())}).natives
        # dict.fromkeys removes duplicates in order, since modules may share a generator.
        self.streams.owned += tuple(dict.fromkeys([item for item in natives if isinstance(item, torch.Generator)]))

    @property
    def roots(self) -> tuple[Any, ...]:
        """The objects from which the guardian walks the state."""
        return (*_roots(self, self.parts),)

    def leaves(self) -> list[tuple[str, Any]]:
        """Return every tensor and plain value of the state with its name."""
        named = [leaf for part in self.parts if part is not OTHERS for leaf in part.leaves(self)]
        if OTHERS not in self.parts:
            return named
        left_out = [part.leaves(self) for part in _NAMED if part not in self.parts]
        return [*named, *_other_leaves(self, chain(named, *left_out))]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state, by name."""
        return {name: leaf for name, leaf in self.leaves() if isinstance(leaf, Tensor)}

    def names(self) -> dict[int, str]:
        """Return the names of tensors, modules and their containers, by the object's id."""
        names = {id(tensor): name for name, tensor in self.tensors().items()}
        for name, module in self.model.named_modules():
            names |= {id(module): f"modules/{name}", id(vars(module)): f"modules/{name}"}
            names |= {id(item): f"modules/{name}.{key}" for key, item in vars(module).items() if isinstance(item, dict)}
        for optimizer in optimizers_of(self):
            for parameter, moments in optimizer.state.items():
                names[id(moments)] = f"optimizer/{names.get(id(parameter), 'unknown').removeprefix('parameters/')}"
            names[id(optimizer.state)] = "optimizer state"
        for label, owner in (("optimizer", self.optimizer), ("scheduler", self.scheduler), ("loop", self.loop)):
            if (space := getattr(owner, "__dict__", None)) is not None:
                names |= {id(owner): label, id(space): label}
        return names

    def out_of_reach(self) -> str:
        """Return a sentence that names the objects whose state cannot be read, or an empty text."""
        opaque = Structure(self.roots).opaque
        if not opaque:
            return ""
        names = {id(item): inner for name, leaf in self.leaves() for inner, item in _nested_items(name, leaf)}
        objects = [f"{names.get(id(item), 'an object of a hook')} is a {qualified(type(item))}" for item in opaque]
        return (
            f"{listed(objects, 3)}: the state of such an object is out of reach, so it can neither be rolled back nor "
            "watched. Replace it by tensors, arrays, numbers or objects of these. If no later step reads its contents, "
            "call loopscope.state.Transient.register on its class."
        )

    def digest(self, parts: Sequence[Part] = ()) -> dict[str, int]:
        """Return 64-bit digests of all entries of the state, or of some parts, by name."""
        leaves = chain.from_iterable([part.leaves(self) for part in parts]) if parts else self.leaves()
        return {name: digest(leaf) for name, leaf in leaves}


def _nested_items(name: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    yield name, leaf
    for index, item in enumerate(leaf) if isinstance(leaf, (list, tuple)) else ():
        yield from _nested_items(f"{name}/{index}", item)


def differing(previous: Mapping[str, int], current: Mapping[str, int]) -> list[str]:
    """Return the names of entries whose digests differ, or that only one side has."""
    return [name for name in {**previous, **current} if previous.get(name) != current.get(name)]


ON_DEMAND = (
    *("gradient_sum", "gradient_steps", "accumulated_grads", "prev_step_grads", "current_grads"),
    *("step_series", "series_steps", "pre_epoch"),
)


def without_on_demand(entries: Mapping[str, Item]) -> dict[str, Item]:
    """Return entries without those that the loop keeps only for hooks: the rest is equal with and without hooks."""
    prefixes = tuple(f"loop/{name}" for name in ON_DEMAND)
    return {name: value for name, value in entries.items() if not name.startswith(prefixes)}
