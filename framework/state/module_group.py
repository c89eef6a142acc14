"""The model of a run together with other modules that its loss or its hooks can reach."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn


class ModuleGroup:
    """A model and other modules, with the walks of ``nn.Module`` over all of them.

    Names in the model are those of the model alone; names in another module start with its key and a dot, so that the
    state of a run with other modules extends that of a run without them. Every object appears once.

    Args:
        model: the trained model.
        others: the other modules by key.
    """

    def __init__(self, model: nn.Module, others: Mapping[str, nn.Module]) -> None:
        self._prefixed = [("", model), *others.items()]

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules with their names."""
        seen: set[nn.Module] = set()
        for prefix, root in self._prefixed:
            yield from root.named_modules(seen, prefix)

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules."""
        for _, module in self.named_modules():
            yield module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters with their names."""
        seen: set[int] = set()
        for prefix, root in self._prefixed:
            for name, parameter in root.named_parameters(prefix):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all buffers with their names."""
        seen: set[int] = set()
        for prefix, root in self._prefixed:
            for name, buffer in root.named_buffers(prefix):
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield name, buffer

    def buffers(self) -> Iterator[Tensor]:
        """Yield all buffers."""
        for _, buffer in self.named_buffers():
            yield buffer


ModuleOrGroup = nn.Module | ModuleGroup
"""The model alone, or with the other modules of its run."""
