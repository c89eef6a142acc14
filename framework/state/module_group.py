"""The model of a run together with other modules that its loss or its hooks can reach."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TypeVar

from torch import Tensor, nn

Named = TypeVar("Named", bound=Tensor)


class ModuleGroup:
    """A model and other modules, with the walks of ``nn.Module`` over all of them, each done once.

    Names in the model are those of the model alone; names in another module start with its key and a dot, so that the
    state of a run with other modules extends that of a run without them. Every object appears once. A group serves
    one reading of the state, during which the modules do not change.

    Args:
        model: the trained model.
        others: the other modules by key.
    """

    def __init__(self, model: nn.Module, others: Mapping[str, nn.Module]) -> None:
        self._prefixed = [("", model), *others.items()]

    @cached_property
    def _modules(self) -> list[tuple[str, nn.Module]]:
        seen: set[nn.Module] = set()
        return [entry for prefix, root in self._prefixed for entry in root.named_modules(seen, prefix)]

    @cached_property
    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return _once(entry for prefix, root in self._prefixed for entry in root.named_parameters(prefix))

    @cached_property
    def _buffers(self) -> list[tuple[str, Tensor]]:
        return _once(entry for prefix, root in self._prefixed for entry in root.named_buffers(prefix))

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules with their names."""
        return iter(self._modules)

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules."""
        return (module for _, module in self._modules)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters with their names."""
        return iter(self._parameters)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters."""
        return (parameter for _, parameter in self._parameters)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all buffers with their names."""
        return iter(self._buffers)

    def buffers(self) -> Iterator[Tensor]:
        """Yield all buffers."""
        return (buffer for _, buffer in self._buffers)


def _once(entries: Iterable[tuple[str, Named]]) -> list[tuple[str, Named]]:
    """Return the named tensors, each under its first name."""
    by_id: dict[int, tuple[str, Named]] = {}
    for name, item in entries:
        by_id.setdefault(id(item), (name, item))
    return [*by_id.values()]


ModuleOrGroup = nn.Module | ModuleGroup
"""The model alone, or with the other modules of its run."""
