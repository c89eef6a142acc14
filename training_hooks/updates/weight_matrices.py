"""The matrices of a model in the orientation (out, in): of linear and recurrent layers, convolutions and experts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from loopscope.tensors import unsharded
from torch import Tensor, nn

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NOT_MULTIPLIED = ("bias", "embed", "pos")
"""Parts of the names of parameters of modules outside torch that are no matrices of products."""


@dataclass(frozen=True)
class WeightMatrix:
    """A matrix in a parameter.

    Args:
        parameter: name of the parameter.
        expert: index of the matrix in a parameter with several, the first dimension; ``None`` for a single matrix.
        is_transposed: whether the parameter is stored as (in, out).
    """

    parameter: str
    expert: int | None = None
    is_transposed: bool = False

    @property
    def name(self) -> str:
        """The name of the parameter, with the index of the expert."""
        return self.parameter if self.expert is None else f"{self.parameter}.{self.expert}"

    def of(self, tensor: Tensor) -> Tensor:
        """Return the matrix, shape (out, in), in a tensor of the parameter's shape, which may be sharded.

        A convolution is unfolded to (out, in·kernel), a transposed one, stored as (in, out, kernel), to
        (out·kernel, in).
        """
        whole = unsharded(tensor.detach())
        matrix = (whole if self.expert is None else whole[self.expert]).flatten(start_dim=1)
        return matrix.T if self.is_transposed else matrix


def weight_matrices(model: nn.Module) -> dict[str, WeightMatrix]:
    """Return the trainable matrices of a model by name, in its order, with at least two rows and columns.

    Embeddings are left out, unless a layer multiplies by the same parameter.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter.is_floating_point():
                owners[names[id(parameter)]].append((module, key))
    matrices: dict[str, WeightMatrix] = {}
    for name, places in owners.items():
        multiplying = [place for place in places if not isinstance(place[0], EMBEDDINGS)]
        if multiplying:
            module, key = multiplying[0]
            matrices |= {matrix.name: matrix for matrix in _matrices_of(name, module, key)}
    return matrices


def _matrices_of(name: str, module: nn.Module, key: str) -> Iterator[WeightMatrix]:
    shape = module._parameters[key].shape  # type: ignore[union-attr]
    kind = _original_class(module)
    is_torch = kind.__module__.partition(".")[0] == "torch"
    if len(shape) < 2 or (not is_torch and any(part in key for part in NOT_MULTIPLIED)):
        return
    # Private: torch has no public base classes of all convolutions.
    if isinstance(module, nn.modules.conv._ConvNd):
        if min(shape[0], shape[1:].numel()) > 1:
            yield WeightMatrix(name, is_transposed=isinstance(module, nn.modules.conv._ConvTransposeNd))
    elif len(shape) == 2 and min(shape) > 1:
        # By name, since transformers may not be installed.
        yield WeightMatrix(name, is_transposed=kind.__name__ == "Conv1D")
    elif len(shape) == 3 and min(shape) > 1 and not is_torch:
        # The flag of experts in transformers whose matrices are stored as (in, out)
        is_transposed = bool(getattr(module, "is_transposed", False))
        for expert in range(shape[0]):
            yield WeightMatrix(name, expert, is_transposed)


def _original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without those that FSDP2 and loopscope derive from it at runtime."""
    derived = ("torch.distributed.", "loopscope.lowbit.")
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith(derived))


def spread(matrices: Mapping[str, WeightMatrix], count: int) -> list[str]:
    """Return the names of at most ``count`` matrices, spread evenly over the model.

    >>> spread(dict.fromkeys("abcdef", WeightMatrix("w")), 3)
    ['a', 'c', 'e']
    """
    names = list(matrices)
    count = min(count, len(names))
    return [names[number * len(names) // count] for number in range(count)]
