"""The complete list of the state that the rest of a run depends on: a table of parts with their operations.

The guardian copies the parts, the tripwire watches them, the audit and the tests of bit identity digest them, and
checkpoints store them. All iterate over :data:`PARTS` and use no other description of a run, so that adding a part here
is sufficient.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ..accelerators import refuse_unprotected
from ..errors import listed
from ..registry import qualified
from ..tensors import inner_tensors, is_shared_memory
from .digest import described, digest
from .generators import Generator, StreamState, from_plain, generators_of_methods, plain
from .model_parts import MODEL_PARTS, device_of, spaces_of_tensors, tensors_of_modules
from .parameter_groups import moments_of, trained_by
from .parts import Leaves, Part, StateObjects, Watched, leaves_of, nested
from .protectable import named_tensors, refuse_unprotectable
from .sharding import FullSharding
from .structure import ReachableObjects
from .update_parts import UPDATE_PARTS, extra_attributes, optimizers_of
from .values import MUTABLE_CONTAINERS, keys_of, short_name, values_of

Item = TypeVar("Item")
MAX_NAMED_DEPTH = 4
"""Depth of nested containers that errors name."""


class Flags(Part):
    """The process-wide settings; not stored, since a resumed run uses those of the new process."""

    name = "flags"
    restored_first = True

    def read(self, state: StateObjects) -> Leaves:
        """Yield every setting."""
        return zip([f"flags/{name}" for name in state.flags.names], state.flags.read_all(), strict=True)

    def keep(self, state: StateObjects, owners: list[Tensor]) -> tuple[Any, ...]:
        """Return every setting."""
        return state.flags.read_all()

    def restore(self, state: StateObjects, owners: list[Tensor], kept: tuple[Any, ...]) -> None:
        """Restore every setting."""
        state.flags.restore(kept)

    def watch(self, state: StateObjects) -> Watched:
        """Compare the settings that are quick to read."""
        flags = state.flags
        flags.refresh()
        all_flags = flags.read_all()

        def differences(readings: Sequence[Any]) -> list[str]:
            return flags.differences(flags.values_of(readings))

        def restore(readings: Sequence[Any]) -> None:
            flags.restore_quick(flags.values_of(readings), all_flags)

        return Watched(
            getters=flags.readers, key=flags.key, refresh=flags.refresh, differences=differences, restore=restore
        )


class ObjectTypes(Part):
    """The names of the classes whose state dicts only the same class can load."""

    name = "kinds"

    def watch(self, state: StateObjects) -> Watched:
        """Compare the classes of all optimizers, the scheduler and the scaler."""
        wrapped = [item for item in optimizers_of(state) if item is not state.optimizer]
        owners: list[tuple[str, Any]] = [("optimizer", state.optimizer)]
        owners += [(f"wrapped optimizer {index}", optimizer) for index, optimizer in enumerate(wrapped)]
        owners += [("scheduler", state.scheduler), ("scaler", state.scaler)]
        present = [(name, owner) for name, owner in owners if owner is not None]

        def restore(previous: Sequence[type]) -> None:
            for (_, owner), kind in zip(present, previous, strict=True):
                if type(owner) is not kind:
                    owner.__class__ = kind

        getters = [partial(type, owner) for _, owner in present]
        names = [f"the class of the {name}" for name, _ in present]
        return Watched(getters=getters, names=names, restore=restore)

    def store(self, state: StateObjects, streams: StreamState) -> dict[str, str]:
        """Return the names of the classes of optimizer, scheduler and scaler."""
        parts = {"optimizer": state.optimizer, "scheduler": state.scheduler, "scaler": state.scaler}
        return {part: "none" if owner is None else type(owner).__qualname__ for part, owner in parts.items()}

    def misfit(self, state: StateObjects, stored: Mapping[str, str]) -> str:
        """Compare the names."""
        for part, kind in self.store(state, state.streams.save()).items():
            if stored.get(part) != kind:
                return f"was written with the {part} {stored.get(part)}, but this one is {kind}"
        return ""


class Scaler(Part):
    """The gradient scaler."""

    name = "scaler"
    has_temporary = True

    def read(self, state: StateObjects) -> Leaves:
        """Yield its state dict."""
        return nested("scaler", self.store(state))

    def keep(self, state: StateObjects, owners: list[Tensor]) -> Any:
        """Return the scaler."""
        return state.scaler

    def watch(self, state: StateObjects) -> Watched:
        """Compare the attributes by value."""
        attributes = {} if state.scaler is None else vars(state.scaler)
        return Watched(spaces=[attributes], label="the scaler") if attributes else Watched()

    def store(self, state: StateObjects, streams: StreamState | None = None) -> dict[str, Any]:
        """Return its state dict."""
        return {} if state.scaler is None else state.scaler.state_dict()

    def load(self, state: StateObjects, stored: Mapping[str, Any]) -> None:
        """Load its state dict."""
        if state.scaler is not None:
            state.scaler.load_state_dict(dict(stored))


class Extras(Part):
    """The declared states of strategy and experiment."""

    name = "extras"

    def read(self, state: StateObjects) -> Leaves:
        """Yield the entries of all state dicts."""
        return chain.from_iterable(nested(name, extra) for name, extra in self.store(state).items())

    def keep(self, state: StateObjects, owners: list[Tensor]) -> dict[str, dict[str, Any]]:
        """Return copies of all state dicts."""
        return deepcopy(self.store(state))

    def restore(self, state: StateObjects, owners: list[Tensor], kept: dict[str, dict[str, Any]]) -> None:
        """Load the copies: copied again, since ``load_state_dict`` may keep them, and one save is restored often."""
        self.load(state, deepcopy(kept))

    def watch(self, state: StateObjects) -> Watched:
        """Compare plain values, and the versions of tensors unless ``state_dict`` copies them."""
        if not any(self.store(state).values()):
            return Watched()
        ids_of_two_calls = [[id(leaf) for _, leaf in self.read(state) if isinstance(leaf, Tensor)] for _ in range(2)]
        # If state_dict() returns new tensors at each call, only the audit compares their bytes.
        are_copies = ids_of_two_calls[0] != ids_of_two_calls[1]

        def read_values() -> tuple[Any, ...]:
            leaves = [leaf for _, leaf in self.read(state)]
            # Only the private _version tells whether a tensor was written to without reading its bytes.
            tensors = () if are_copies else [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
            others = [described(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
            return (*chain.from_iterable(tensors), *others)

        return Watched(read_values=read_values, label="the declared state of experiment or strategy")

    def store(self, state: StateObjects, streams: StreamState | None = None) -> dict[str, dict[str, Any]]:
        """Return all state dicts by name."""
        return {name: extra.state_dict() for name, extra in state.extras.items()}

    def load(self, state: StateObjects, stored: Mapping[str, Any]) -> None:
        """Load all state dicts."""
        for name, extra in state.extras.items():
            extra.load_state_dict(stored[name])


class Loop(Part):
    """The position and the accumulators of the training loop."""

    name = "loop"
    has_temporary = True

    def read(self, state: StateObjects) -> Leaves:
        """Yield every field; of the state copy before the epoch its tensors."""
        for name, value in vars(state.loop).items():
            if name == "batch":
                yield from leaves_of("loop/batch", value)
            else:
                yield from nested(f"loop/{name}", value.tensors if name == "pre_epoch" and value is not None else value)

    def keep(self, state: StateObjects, owners: list[Tensor]) -> dict[str, Any]:
        """Return the fields."""
        return vars(state.loop)

    def watch(self, state: StateObjects) -> Watched:
        """Compare the fields by value, and the tensors in them; a tripwire reads the contents of the batch, too."""
        fields = vars(state.loop)
        label = "the batch, the loss, accumulated gradients or the loop's counters"
        return Watched(step_tensors=fields, spaces=[fields], label=label)

    def store(self, state: StateObjects, streams: StreamState) -> dict[str, Any]:
        """Return the fields that a checkpoint contains."""
        return state.loop.state_dict()

    def load(self, state: StateObjects, stored: Any) -> None:
        """Set the fields; tensors, which checkpoints read to the CPU, on the device of the model."""
        device = device_of(state)
        vars(state.loop).update(tree_map_only(Tensor, methodcaller("to", device), stored))


class Generators(Part):
    """The run's random generators."""

    name = "generators"

    def read(self, state: StateObjects) -> Leaves:
        """Yield the state of every generator, in tuples: they are copies, not tensors of the state."""
        streams = state.streams.save()
        yield "generators/torch", (streams.torch_cpu,)
        states = streams.global_states
        yield "generators/python", (states.of_python, states.python_gaussian)
        yield "generators/numpy", (states.of_numpy, states.second_gaussian)
        for index, (_, generator_state) in enumerate((*streams.accelerators, *streams.owned)):
            yield f"generators/{index}", (generator_state,)

    def keep(self, state: StateObjects, owners: list[Tensor]) -> StreamState:
        """Return the state of every generator."""
        return state.streams.save()

    def restore(self, state: StateObjects, owners: list[Tensor], kept: StreamState) -> None:
        """Restore every generator."""
        kept.restore()

    def store(self, state: StateObjects, streams: StreamState) -> dict[str, Any]:
        """Return the states as tensors and plain values."""
        return plain(streams)

    def load(self, state: StateObjects, stored: Mapping[str, Any]) -> None:
        """Restore every generator."""
        from_plain(stored, state.streams.save()).restore()


class OtherTensors(Part):
    """Tensors that the guardian finds but no other part names, such as parameters that only the optimizer has.

    Checkpoints store only such parameters; they store other tensors with the state of the object that holds them.
    """

    name = "other tensors"

    def read(self, state: StateObjects) -> Leaves:
        """Yield the tensors that no other part names."""
        return _other_leaves(state, chain.from_iterable(part.read(state) for part in _NAMED))

    def watch(self, state: StateObjects) -> Watched:
        """Compare the parameters that only the optimizer has, such as a learned temperature, and their gradients."""
        parameters = self.store(state)
        if not parameters:
            return Watched()
        return Watched(
            tables=[parameters],
            read_tensors=partial(map, attrgetter("grad"), [*parameters.values()]),
            getters=[partial(getattr, parameter, "requires_grad") for parameter in parameters.values()],
            label="a parameter that only the optimizer has",
        )

    def store(self, state: StateObjects, streams: StreamState | None = None) -> dict[str, Tensor]:
        """Return the parameters that only the optimizer has."""
        model_ids = {*map(id, state.modules.parameters())}
        parameters = [item for item in trained_by(state.optimizer) if id(item) not in model_ids]
        return {str(index): tensor for index, tensor in enumerate(parameters)}

    @torch.no_grad()
    def load(self, state: StateObjects, stored: Mapping[str, Any]) -> None:
        """Copy the parameters in place, since the optimizer's groups refer to these tensors."""
        present = self.store(state)
        if len(stored) != len(present):
            raise ValueError(
                f"{len(stored)} parameters that only the optimizer has were stored, but this optimizer has "
                f"{len(present)}"
            )
        for name, tensor in present.items():
            tensor.copy_(stored[name])


def _roots(state: StateObjects, parts: Sequence[Part]) -> Iterator[Any]:
    """Yield the objects from which the guardian walks the state."""
    owners: list[Tensor] = [*state.modules.parameters()]
    for part in parts:
        yield from part.persistent(state)
        if part.has_temporary:
            yield from part.temporary(part.keep(state, owners))


def _other_leaves(state: StateObjects, named: Iterable[tuple[str, Any]]) -> Leaves:
    """Yield tensors that the guardian finds but no part names, such as parameters that only the optimizer has."""
    named_ids: set[int] = set()
    for _, leaf in named:
        named_ids.add(id(leaf))
        if isinstance(leaf, Tensor):
            named_ids.update(map(id, inner_tensors(leaf)))
    unnamed = [tensor for tensor in ReachableObjects(_roots(state, _NAMED)).tensors if id(tensor) not in named_ids]
    return ((f"other tensors/{index}", tensor) for index, tensor in enumerate(unnamed))


EXTRAS, GENERATORS, OTHERS = Extras(), Generators(), OtherTensors()
# A new part belongs here, so that OtherTensors knows its tensors. Flags are first: an entered mode, which could
# intercept the restoration of other parts, is left before them.
_NAMED = (Flags(), ObjectTypes(), *MODEL_PARTS, *UPDATE_PARTS, Scaler(), EXTRAS, Loop())
PARTS = (*_NAMED, OTHERS, GENERATORS)


@dataclass
class TrainingState(StateObjects):
    """References to everything that the rest of the run depends on, and the table of parts."""

    parts: Sequence[Part] = PARTS
    spare_copies: list[Any] = field(default_factory=list, repr=False)
    """Copies of the modules that passes of hooks use again."""

    def __post_init__(self) -> None:
        """Read the modules; of a DistributedDataParallel model those of the inner one."""
        # The inner module: DDP's reducer keeps state in C++, which no rollback restores.
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.model.module
        self._read_modules()

    def _read_modules(self) -> None:
        """Add the random generators that modules hold, or their methods draw from, to the run's generators."""
        modules = self.modules
        refuse_unprotected({parameter.device for parameter in modules.parameters()})
        refuse_unprotectable(self._tensors_at_start())
        self.sharding = FullSharding(modules)
        attributes = [value for module in modules.modules() for value in extra_attributes(module)]
        natives = ReachableObjects(attributes, excluded={*map(id, modules.parameters())}).natives
        # Others on modules are parts of the modules' states.
        on_modules = {id(item) for item in natives if not isinstance(item, torch.Generator)}
        generators: list[Generator] = [item for item in natives if isinstance(item, torch.Generator)]
        generators += [item for item in generators_of_methods(modules.modules()) if id(item) not in on_modules]
        by_id = {id(item): item for item in (*self.streams.owned, *generators)}
        self.streams.owned = (*by_id.values(),)

    def include(self, modules: Mapping[str, nn.Module]) -> None:
        """Add other modules to the state, whose names in it start with the given keys."""
        self.also |= modules
        self._read_modules()

    def _tensors_at_start(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of model and optimizer before the first step, with their names."""
        yield from tensors_of_modules(self)
        for name, module in self.modules.named_modules():
            yield from named_tensors(f"modules/{name}.", vars(module))
        for optimizer in optimizers_of(self):
            for moments in moments_of(optimizer).values():
                yield from named_tensors("optimizer state ", moments if isinstance(moments, dict) else {})

    def roots(self, parts: Sequence[Part] = ()) -> tuple[Any, ...]:
        """Return the objects from which the guardian walks all parts of the state, or some."""
        return (*_roots(self, parts or self.parts),)

    def leaf_values(self, parts: Sequence[Part] = ()) -> list[tuple[str, Any]]:
        """Return every tensor and plain value of the state, or of some parts, with its name."""
        with self.modules_listed():
            if parts:
                return [leaf for part in parts for leaf in part.read(self)]
            named = [leaf for part in self.parts if part is not OTHERS for leaf in part.read(self)]
            if OTHERS not in self.parts:
                return named
            left_out = [part.read(self) for part in _NAMED if part not in self.parts]
            return [*named, *_other_leaves(self, chain(named, *left_out))]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state, by name."""
        return {name: leaf for name, leaf in self.leaf_values() if isinstance(leaf, Tensor)}

    def names(self) -> dict[int, str]:
        """Return the names of tensors, modules and their containers, by the object's id."""
        names = {id(tensor): name for name, tensor in self.tensors().items()}
        for name, module in self.modules.named_modules():
            names |= {id(module): f"modules/{name}", id(vars(module)): f"modules/{name}"}
            names |= _container_names(f"modules/{name}.", vars(module))
        for name, attributes in spaces_of_tensors(self):
            names |= _container_names(f"{name}.", attributes) | {id(attributes): name}
        for optimizer in optimizers_of(self):
            for parameter, moments in (states := moments_of(optimizer)).items():
                names[id(moments)] = f"optimizer/{names.get(id(parameter), 'unknown').removeprefix('parameters/')}"
            names[id(states)] = "optimizer state"
        for label, owner in (("optimizer", self.optimizer), ("scheduler", self.scheduler), ("loop", self.loop)):
            if (space := getattr(owner, "__dict__", None)) is not None:
                names = _container_names(f"{label}.", space) | names | {id(owner): label, id(space): label}
        return names

    def out_of_reach(self) -> str:
        """Return a sentence that names the objects whose state cannot be read, or an empty text."""
        if any(map(is_shared_memory, self.modules.parameters())):
            return (
                "Weights are in shared memory, where other processes may train them at any time: hooks read them while "
                "they change, such changes are not checked, and hooks that train and roll back are left out. To "
                "observe a model without such processes, copy it instead of sharing it: copy.deepcopy(model)."
            )
        opaque = ReachableObjects(self.roots()).opaque
        if not opaque:
            return ""
        names = {id(item): inner for name, leaf in self.leaf_values() for inner, item in _nested_items(name, leaf)}
        objects = [f"{names.get(id(item), 'an object of a hook')} is a {qualified(type(item))}" for item in opaque]
        return (
            f"{listed(objects, 3)}: the state of such an object is out of reach, so it can neither be rolled back nor "
            "watched. Replace it by tensors, arrays, numbers or objects of these. If no later step reads its contents, "
            "call loopscope.state.Transient.register on its class."
        )

    def digest(self, parts: Sequence[Part] = ()) -> dict[str, int]:
        """Return 64-bit digests of all entries of the state, or of some parts, by name."""
        return {name: digest(leaf) for name, leaf in self.leaf_values(parts)}


def _container_names(prefix: str, space: Mapping[Any, Any], depth: int = 0) -> dict[int, str]:
    """Return the names of the containers in a dict, of those in these too, by their ids."""
    names: dict[int, str] = {}
    for key, item in space.items():
        if isinstance(item, MUTABLE_CONTAINERS):
            names[id(item)] = name = f"{prefix}{short_name(key)}"
            if depth < MAX_NAMED_DEPTH and not isinstance(item, set):
                names |= _container_names(f"{name}.", _by_key(item), depth + 1)
    return names


def _by_key(container: Any) -> dict[Any, Any]:
    values = values_of(container)
    return dict(zip(keys_of(container) if isinstance(container, dict) else count(), values, strict=False))


def _nested_items(name: str, leaf: Any) -> Iterator[tuple[str, Any]]:
    yield name, leaf
    for index, item in enumerate(leaf) if isinstance(leaf, (list, tuple)) else ():
        yield from _nested_items(f"{name}/{index}", item)


def differing(previous: Mapping[str, int], current: Mapping[str, int]) -> list[str]:
    """Return the names of entries whose digests differ, or that only one side has."""
    return [name for name in {**previous, **current} if previous.get(name) != current.get(name)]


ON_DEMAND = (
    *("gradient_sum", "gradient_steps", "accumulated_grads", "prev_step_grads", "current_grads"),
    *("step_series", "series_steps", "pre_epoch", "has_unreported_evaluation"),
)


def without_on_demand(entries: Mapping[str, Item]) -> dict[str, Item]:
    """Return entries without those that the loop keeps only for hooks: the rest is equal with and without hooks."""
    prefixes = tuple(f"loop/{name}" for name in ON_DEMAND)
    return {name: value for name, value in entries.items() if not name.startswith(prefixes)}
