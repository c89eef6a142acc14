"""The matrices of a model: which can be cast, by what name, and what share of the work they are."""

from dataclasses import dataclass

from torch import nn

from ..errors import listed
from .linear import BitLinear
from .metis import LowRankFactors
from .products import SUFFIX, ProductCasts, matrix_of, plain_class

ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj")
"""The projections of ``nn.MultiheadAttention``, which multiplies by them itself."""
SMALL = 0.5  # a share of the multiplications below which a user is told


@dataclass(frozen=True)
class Matrix:
    """A matrix, or several of one parameter, that can be cast.

    Args:
        owner: the linear layer, or the module that multiplies.
        key: of a module that multiplies: what :func:`.matrix_of` finds it by; empty for a linear layer.
    """

    owner: nn.Module
    key: str = ""

    @property
    def weight(self) -> nn.Parameter:
        """The parameter."""
        return matrix_of(self.owner, self.key or "weight")

    @property
    def layer(self) -> BitLinear | None:
        """What casts it, if that is done."""
        found = self.owner._modules.get(self.key + SUFFIX) if self.key else self.owner
        return found if isinstance(found, BitLinear) else None


def known_matrices(model: nn.Module) -> dict[str, Matrix]:
    """Return what can be cast, by the name of its layer, or if a module has several matrices by the parameter's.

    That is the weight of a linear layer (``nn.Linear`` itself; users of other subclasses might not call them) and of
    the ``Conv1D`` of Hugging Face, the projections of ``nn.MultiheadAttention``, and the three-dimensional parameters
    of modules that torch does not have: experts, a matrix for each. A weight that is computed from other parameters, by
    pruning or weight normalisation say, is none.
    """
    found: dict[str, Matrix] = {}
    for name, module in model.named_modules():
        if isinstance(module, ProductCasts):
            continue
        if isinstance(module, BitLinear) or (type(module) is nn.Linear and has_own_weight(module)):
            found[name] = Matrix(module)
        for key in _keys(module):
            found[name if key == "weight" else f"{name}.{key}".strip(".")] = Matrix(module, key)
    return found


def has_own_weight(module: nn.Module) -> bool:
    """Return whether the weight of a layer is a parameter, and not computed from others, as by ``prune``."""
    return module._parameters.get("weight") is not None


def _keys(module: nn.Module) -> list[str]:
    plain = plain_class(module)
    own = {key: each for key, each in module._parameters.items() if each is not None and each.is_floating_point()}
    if plain is nn.MultiheadAttention:
        children = {key: child for key, child in module._modules.items() if child is not None and has_own_weight(child)}
        return [key for key in ATTENTION if key in own or key in children]
    if plain.__name__ == "Conv1D" and "weight" in own and own["weight"].ndim == 2:  # its package need not be there
        return ["weight"]
    if plain.__module__.partition(".")[0] == "torch":
        return []
    return [key for key, each in own.items() if each.ndim == 3 and min(each.shape) > 1]


class CastNames(list[str]):
    """The names of the matrices that were cast, and what share of the model's they are.

    A matrix parameter is one with two dimensions or more. The work counted is the multiplications of products by
    matrices for a token that passes every matrix once, each expert's too: none for embeddings, which are looked up,
    one product for each layer that shares a matrix. Left out are convolutions, which use a matrix as often as their
    input is large, products of activations, as in attention, and what is computed without a module of its own.

    Attributes:
        matrix_share: elements of matrix parameters that are cast, now or before, of all; 0 to 1.
        flop_share: the part of the work that is cast, forward as well as backward; 0 to 1.
        left: by name, the elements of the matrices by which the model multiplies in full precision.
        tied: by name, the embedding with which a layer that is cast now shares its matrix.
    """

    matrix_share: float
    flop_share: float
    left: dict[str, int]
    tied: dict[str, str]

    def notes(self) -> list[str]:
        """Return what a user may not expect, a sentence each."""
        found = [
            f"The layer {name!r} shares its matrix with the embedding {other!r} (tied): its product sees the narrow "
            f"matrix, the embedding the full one; exclude={[name]} leaves both in full precision."
            for name, other in self.tied.items()
        ]
        if self.flop_share < SMALL:
            worst = sorted(self.left, key=lambda name: -self.left[name])
            found.append(
                f"Only {self.flop_share:.1%} of the multiplications by matrices are cast ({self.matrix_share:.1%} of "
                f"the matrix parameters); in full precision: {listed([repr(name) for name in worst], 4) or 'none'}."
            )
        return found


def cast_names(model: nn.Module, names: list[str]) -> CastNames:
    """Return the names of matrices that have just been cast, with the shares."""
    known = known_matrices(model)
    cast = {name: each.weight for name, each in known.items() if each.layer is not None}
    is_cast = {id(weight) for weight in cast.values()}
    label = {id(each.weight): name for name, each in known.items()}
    elements: dict[int, int] = {}
    left: dict[str, int] = {}
    embeddings: dict[int, str] = {}
    work = 0
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.ndim < 2 or isinstance(module, LowRankFactors):
                continue  # factors begin as zeros, and stand for what is counted as the weight
            elements[id(parameter)] = parameter.numel()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                embeddings.setdefault(id(parameter), name)
            elif not isinstance(module, nn.modules.conv._ConvNd):
                work += parameter.numel()
                if id(parameter) not in is_cast:
                    left[label.get(id(parameter), f"{name}.{key}".strip("."))] = parameter.numel()
    share = sum(elements[each] for each in is_cast) / max(1, sum(elements.values()))
    done = sum(weight.numel() for weight in cast.values()) / max(1, work)
    tied = {name: embeddings[id(cast[name])] for name in names if id(cast[name]) in embeddings}
    found = CastNames(names)
    found.matrix_share, found.flop_share, found.left, found.tied = share, done, left, tied
    return found
