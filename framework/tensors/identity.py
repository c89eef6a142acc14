"""The identity of tensors: class, storage, layout, requires_grad, attributes, hooks and memory address."""

from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .memory import addresses
from .shards import dtensor_class
from .storage import COMPRESSED, PLAIN, byte_tensors, inner_by_name, inner_tensors, is_wrapper, regrow

# Autograd stores the hooks of a tensor in private dicts, or None before the first hook is registered.
ATTACHED = {name: attrgetter(name) for name in ("__dict__", "_backward_hooks", "_post_accumulate_grad_hooks")}
_shape = attrgetter("shape")
_dtype = attrgetter("dtype")
_requires_grad = attrgetter("requires_grad")
# The address of a tensor's TensorImpl (the C++ object).
_implementation = attrgetter("_cdata")
_use_count = methodcaller("_use_count")
_layout = attrgetter("layout")


def is_owner(tensor: Tensor) -> bool:
    """Return whether a tensor may carry a gradient and hooks: a parameter, or a leaf that requires a gradient."""
    kind = type(tensor)
    if kind is nn.Parameter or (tensor.requires_grad and tensor.is_leaf):
        return True
    # Last, since it is slow: the metaclass of Parameter decides, so that tensor subclasses can be parameters too.
    return kind is not Tensor and isinstance(tensor, nn.Parameter)


def attached(tensor: Tensor) -> Iterator[Any]:
    """Yield the objects attached to a tensor: dicts of attributes and hooks, and a wrapper's inner tensors."""
    if type(tensor) is not Tensor and type(tensor) is dtensor_class() and not tensor.requires_grad:
        yield tensor._local_tensor  # type: ignore[attr-defined]  # the same result as below, at a tenth of the cost
        return
    if is_owner(tensor):
        yield from (read(tensor) for read in ATTACHED.values())
    yield from inner_tensors(tensor)


class Mark(NamedTuple):
    """The properties of one tensor's identity that are compared by value."""

    kind: type
    pointer: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_conjugate: bool
    is_negative: bool


class TensorIdentities:
    """The identities of many tensors at one time, compared together and restored one by one."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        read_pointer = _pointer_reader(tensors)
        read_stride = Tensor.stride if COMPRESSED.isdisjoint(map(_layout, tensors)) else _no_stride
        # In the order of the fields of a mark.
        self._readers: tuple[Callable[[Tensor], Any], ...] = (type, read_pointer, _shape, read_stride, _dtype)
        self._readers += (_requires_grad, Tensor.is_conj, Tensor.is_neg)
        self._marks = types, *_, requires_grad, _, _ = self._read_marks()
        plain = PLAIN.issuperset(types)
        # read once: finding the names of a wrapper's inner tensors takes longer than reading the tensors
        self._inner = [] if plain else _inner_names(tensors)
        self.owners = [*filter(is_owner, tensors)] if not plain or any(requires_grad) else []
        # torch.utils.swap_tensors exchanges the TensorImpls of two Python objects.
        self._implementations = [*map(_implementation, self.owners)]
        # 1 if only the Python object refers to the TensorImpl, more if a graph holds the node that accumulates its
        # gradient; hooks left on that node would act in the run's backward pass.
        self._uses = [*map(_use_count, self.owners)]
        self._attachments = self._read_attachments()
        self._addresses = addresses(self._attachments)
        # detach() shares the storage, and keeps it if the storage of the original is replaced by ``.data`` or set_().
        self._aliases = [*map(Tensor.detach, tensors)]
        simple = plain and read_pointer is Tensor.data_ptr
        self.bytes = self._aliases if simple else [part for alias in self._aliases for part in byte_tensors(alias)]
        """Tensors on the storages of the originals; they keep these storages alive."""

    def _read_marks(self) -> tuple[list[Any], ...]:
        return tuple([[*map(read, self._tensors)] for read in self._readers])

    def _read_attachments(self) -> tuple[Any, ...]:
        attachments = [item for read in ATTACHED.values() for item in map(read, self.owners)]
        return (*attachments, *[getattr(wrapper, name) for wrapper, name in self._inner])

    def is_current(self, *, keeps_graphs: bool = False) -> bool:
        """Return whether no tensor has changed, apart from its bytes; with ``keeps_graphs`` graphs may be new."""
        return (
            self._marks == self._read_marks()
            and self._implementations == [*map(_implementation, self.owners)]
            and self._addresses == addresses(self._read_attachments())
            and (keeps_graphs or self._uses == [*map(_use_count, self.owners)] or not self._newly_referenced())
        )

    def _newly_referenced(self) -> list[Tensor]:
        """List the owners that autograd refers to now but did not before, because a graph is kept alive."""
        return [owner for owner, uses in zip(self.owners, self._uses, strict=True) if uses == 1 < _use_count(owner)]

    def changed(self) -> list[Tensor]:
        """List the tensors that changed, apart from their bytes and memory addresses."""
        holders = [*self.owners * len(ATTACHED), *[wrapper for wrapper, _ in self._inner]]
        pairs = zip(holders, self._attachments, self._read_attachments(), strict=True)
        changed = [
            self._tensors[index]
            for index, old, new in self._changes()
            if old._replace(pointer=0) != new._replace(pointer=0)
        ]
        # The first hook of a tensor leaves an empty dict behind when it is removed.
        return changed + [holder for holder, old, new in pairs if old is not new and (old is not None or new)]

    def _changes(self) -> Iterator[tuple[int, Mark, Mark]]:
        """Yield the index of every tensor whose mark differs, with its former and its current mark."""
        old, new = zip(*self._marks, strict=True), zip(*self._read_marks(), strict=True)
        for index, (previous, after) in enumerate(zip(old, new, strict=True)):
            if previous != after:
                yield index, Mark(*previous), Mark(*after)

    def restore(self, *, keeps_graphs: bool = False) -> None:
        """Restore the identity of every tensor, but not its bytes; with ``keeps_graphs`` new graphs stay usable."""
        if self.is_current(keeps_graphs=keeps_graphs):
            return
        owners = set(map(id, self.owners))
        for index, previous, _ in self._changes():
            tensor = self._tensors[index]
            leaf = not previous.requires_grad or id(tensor) in owners
            _restore_tensor(tensor, self._aliases[index], previous, leaf=leaf)
        attachments = iter(self._attachments)
        for name in ATTACHED:
            for owner, table in zip(self.owners, attachments, strict=False):
                _attach(owner, name, table)
        for (wrapper, name), inner in zip(self._inner, attachments, strict=True):
            setattr(wrapper, name, inner)
        for owner in () if keeps_graphs else self._newly_referenced():
            _drop_accumulator(owner)


class BriefIdentities:
    """The identities of temporary tensors without gradients: restored without comparing them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if type(tensor) is Tensor]
        self._inner = [(wrapper, name, getattr(wrapper, name)) for wrapper, name in _inner_names(tensors)]
        self._aliases = self.bytes = [*map(Tensor.detach, self._tensors)]
        self._pointers = [*map(Tensor.data_ptr, self._tensors)]

    @classmethod
    def suit(cls, tensors: list[Tensor]) -> bool:
        """Return whether all ``tensors`` are plain strided tensors, or DTensors of these, without requires_grad."""
        kinds = {*map(type, tensors)} - {dtensor_class()}
        simple = {Tensor}.issuperset(kinds) and _pointer_reader(tensors) is Tensor.data_ptr
        return simple and not any(map(_requires_grad, tensors))

    def restore(self) -> None:
        """Restore the identity of every tensor, but not its bytes."""
        for wrapper, name, inner in self._inner:
            setattr(wrapper, name, inner)
            _clear_requires_grad(wrapper)
        # FSDP and offloading free memory by resizing a storage to 0, which changes the pointer of every tensor on it.
        shrunk = self._pointers != [*map(Tensor.data_ptr, self._aliases)]
        for tensor, alias in zip(self._tensors, self._aliases, strict=True):
            if shrunk:
                regrow(alias)
            if type(tensor) is not Tensor or tensor.requires_grad:
                tensor.__class__ = Tensor
                _clear_requires_grad(tensor)
            tensor.data = alias


def _clear_requires_grad(tensor: Tensor) -> None:
    if tensor.requires_grad:
        if tensor.grad_fn is not None:  # requires_grad of a non-leaf cannot be set
            tensor.detach_()
        tensor.requires_grad_(False)


def _inner_names(tensors: list[Tensor]) -> list[tuple[Any, str]]:
    """Return pairs of every wrapper among the tensors and the name of each of its inner tensors."""
    wrappers = [tensor for tensor in tensors if type(tensor) not in PLAIN and is_wrapper(tensor)]
    return [(tensor, name) for tensor in wrappers for name in inner_by_name(tensor)]


def _pointer_reader(tensors: list[Tensor]) -> Callable[[Tensor], Any]:
    """Return the fast reader of memory addresses if all tensors are strided, otherwise the general one."""
    return Tensor.data_ptr if all([layout is torch.strided for layout in map(_layout, tensors)]) else _pointer


def _pointer(tensor: Tensor) -> Any:
    """Return the memory address of a strided tensor, or addresses and shapes of a sparse one's parts."""
    if tensor.layout is torch.strided:
        return tensor.data_ptr()
    return [(part.data_ptr(), part.shape) for part in byte_tensors(tensor)]


def _no_stride(tensor: Tensor) -> tuple[int, ...]:
    return () if tensor.layout in COMPRESSED else tensor.stride()


def _restore_tensor(tensor: Any, alias: Tensor, previous: Mark, *, leaf: bool) -> None:
    """Restore kind of device, class, storage, layout and requires_grad of a tensor."""
    if tensor.device.type != alias.device.type and not is_wrapper(alias):  # ``.data`` rejects another kind of device
        torch.utils.swap_tensors(tensor, alias.detach())  # type: ignore[no-untyped-call]
    if type(tensor) is not previous.kind:
        tensor.__class__ = previous.kind
    if leaf and tensor.grad_fn is not None:  # an in-place write under a graph has made it a non-leaf
        tensor.detach_()
    if not is_wrapper(alias):
        if alias.layout is torch.strided and alias.data_ptr() != previous.pointer:
            regrow(alias)
        tensor.data = alias
    if tensor.requires_grad != previous.requires_grad:
        # Last, since non-leaf and integer tensors reject it.
        tensor.requires_grad_(previous.requires_grad)


def _drop_accumulator(owner: Any) -> None:
    """Drop the node that accumulates a tensor's gradient, with the hooks on it, by changing the dtype twice."""
    if not is_wrapper(owner):
        # Autograd's set_data drops the accumulator only if dtype or device change.
        data = owner.data
        owner.data = data.to(torch.float64 if data.dtype is torch.float32 else torch.float32)
        owner.data = data


def _attach(owner: Any, name: str, table: dict[Any, Any] | None) -> None:
    """Set a dict of attributes or hooks; of hooks also the present one, since a swapped TensorImpl lacks them."""
    present = getattr(owner, name)
    # A tensor's __dict__ can be replaced like any attribute; the setters of the hooks also update the C++ side.
    if name == "__dict__":
        if present is not table:
            setattr(owner, name, table)
        return
    if present is not None and present is not table:
        present.clear()  # autograd keeps using the dict of hooks after the attribute is unset
    if present is not None or table is not None:
        setattr(owner, name, table)
