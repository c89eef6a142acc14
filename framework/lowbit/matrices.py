"""Matrices of a model that can be cast: their names, and their share of the computation."""

import re
from dataclasses import dataclass

from torch import nn

from ..errors import listed
from .linear import BitLinear
from .metis import LowRankFactors
from .products import SUFFIX, ParameterCasts, matrix_of, original_class

ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj")
"""The projections of ``nn.MultiheadAttention``, which computes their products without calling layers."""
ADDED = re.compile(r"pos(ition)?(al)?_?emb|(cls|class|mask|dist|register)_?(tok|emb)|(^|_)tokens?$")
"""Names of parameters that are added to activations or concatenated with them."""
SMALL_SHARE = 0.5  # a notice reports a smaller share of the multiplications


@dataclass(frozen=True)
class Matrix:
    """A matrix, or several in one parameter, that can be cast.

    Args:
        owner: the linear layer, or another module that multiplies by the matrix.
        key: the argument for :func:`.matrix_of` if the owner is another module; empty for a linear layer.
    """

    owner: nn.Module
    key: str = ""

    @property
    def weight(self) -> nn.Parameter:
        """The parameter with the matrix."""
        return matrix_of(self.owner, self.key or "weight")

    @property
    def layer(self) -> BitLinear | None:
        """The layer that casts it, if it is cast."""
        layer = self.owner._modules.get(self.key + SUFFIX) if self.key else self.owner
        return layer if isinstance(layer, BitLinear) else None


def castable_matrices(model: nn.Module) -> dict[str, Matrix]:
    """Return the matrices that can be cast, by layer name; by parameter name if a module has several.

    These are the weights of linear layers (exactly ``nn.Linear``; code with other subclasses might not call them) and
    of Hugging Face's ``Conv1D``, the projections of ``nn.MultiheadAttention``, and three-dimensional parameters of
    modules outside torch, which contain a matrix per expert. Weights that are computed from other parameters, such as
    by pruning or weight normalisation, cannot be cast.
    """
    matrices: dict[str, Matrix] = {}
    for name, module in model.named_modules():
        if isinstance(module, ParameterCasts):
            continue
        if isinstance(module, BitLinear) or (type(module) is nn.Linear and has_weight_parameter(module)):
            matrices[name] = Matrix(module)
        for key in _keys(module):
            matrices[name if key == "weight" else f"{name}.{key}".strip(".")] = Matrix(module, key)
    return matrices


def has_weight_parameter(module: nn.Module) -> bool:
    """Return whether the weight of a layer is a parameter, not computed from others (for example by ``prune``)."""
    return module._parameters.get("weight") is not None


def _keys(module: nn.Module) -> list[str]:
    plain = original_class(module)
    parameters = {
        key: leaf for key, leaf in module._parameters.items() if leaf is not None and leaf.is_floating_point()
    }
    if plain is nn.MultiheadAttention:
        children = {
            key: child for key, child in module._modules.items() if child is not None and has_weight_parameter(child)
        }
        return [key for key in ATTENTION if key in parameters or key in children]
    # By name, since ``transformers`` may not be installed.
    if plain.__name__ == "Conv1D" and "weight" in parameters and parameters["weight"].ndim == 2:
        return ["weight"]
    if plain.__module__.partition(".")[0] == "torch":
        return []
    return [key for key, leaf in parameters.items() if leaf.ndim == 3 and min(leaf.shape) > 1]


def _is_added(key: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a table that is added to activations, by its shape or name."""
    return (parameter.ndim > 2 and len(parameter) == 1) or ADDED.search(key) is not None


class CastNames(list[str]):
    """The names of the matrices that were cast, and their shares of the model.

    A matrix parameter has two dimensions or more. The work is the number of multiplications by matrices for a token
    that passes every matrix once, including each expert: none for embeddings, which are looked up, and one product for
    each layer that shares a matrix. It excludes convolutions, which use a matrix more often for larger inputs, products
    of activations, as in attention, and computations outside of modules.

    Attributes:
        matrix_share: the fraction of the elements of matrix parameters that are cast, by this call or before; 0 to 1.
        flop_share: the fraction of the work that is cast, forward and backward; 0 to 1.
        left: the sizes of the matrices that the model multiplies by in full precision, by name. Tables that are added,
            such as class tokens and position embeddings, are omitted: parameters with a first dimension of 1 of three
            or more, or with a name such as ``cls_token`` or ``pos_embed``.
        tied: the embeddings that share a matrix with a layer that is cast by this call, by the layer's name.
    """

    matrix_share: float
    flop_share: float
    left: dict[str, int]
    tied: dict[str, str]

    def notes(self) -> list[str]:
        """Return notices about tied embeddings and a small share of casts, one sentence each."""
        notes = [
            f"The layer {name!r} shares its matrix with the embedding {embedding!r} (tied): the layer's product uses "
            f"the cast matrix, the embedding the full one; exclude={[name]} leaves both in full precision."
            for name, embedding in self.tied.items()
        ]
        if self.flop_share < SMALL_SHARE:
            by_size = sorted(self.left, key=self.left.__getitem__, reverse=True)
            notes.append(
                f"Only {self.flop_share:.1%} of the multiplications by matrices are cast ({self.matrix_share:.1%} of "
                f"the matrix parameters); in full precision: {listed([repr(name) for name in by_size], 4) or 'none'}."
            )
        return notes


def cast_names(model: nn.Module, names: list[str]) -> CastNames:
    """Return the names of matrices that have just been cast, with their shares of the model."""
    matrices = castable_matrices(model)
    cast = {name: matrix.weight for name, matrix in matrices.items() if matrix.layer is not None}
    cast_ids = {id(weight) for weight in cast.values()}
    label = {id(matrix.weight): name for name, matrix in matrices.items()}
    elements: dict[int, int] = {}
    left: dict[str, int] = {}
    embeddings: dict[int, str] = {}
    work = 0
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.ndim < 2 or isinstance(module, LowRankFactors):
                continue  # factors start as zeros, and replace parts of a weight that is counted already
            elements[id(parameter)] = parameter.numel()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                embeddings.setdefault(id(parameter), name)
            # Private: torch has no public base class of all convolutions.
            elif not isinstance(module, nn.modules.conv._ConvNd) and not _is_added(key, parameter):
                work += parameter.numel()
                if id(parameter) not in cast_ids:
                    left[label.get(id(parameter), f"{name}.{key}".strip("."))] = parameter.numel()
    matrix_share = sum(elements[cast_id] for cast_id in cast_ids) / max(1, sum(elements.values()))
    flop_share = sum(weight.numel() for weight in cast.values()) / max(1, work)
    tied = {name: embeddings[id(cast[name])] for name in names if id(cast[name]) in embeddings}
    result = CastNames(names)
    result.matrix_share, result.flop_share, result.left, result.tied = matrix_share, flop_share, left, tied
    return result
