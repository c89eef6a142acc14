"""The matrices in the parameters of a model: one in most, one for each expert in some."""

from collections.abc import Mapping

from torch import Tensor, nn


def convolution_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of convolutions, parametrized ones included."""
    # Private: torch has no public base class of all convolutions.
    convolutions = (module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd))
    return {id(parameter) for module in convolutions for parameter in module.parameters()}


def stacks_of_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with one matrix per expert, shape (experts, rows, columns), by name.

    These are three-dimensional parameters outside of convolutions; a first dimension of 1 is not a stack, but that of
    a table of positions.
    """
    convolutions = convolution_parameters(model)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and min(parameter.shape) > 1 and id(parameter) not in convolutions
    }


def as_matrices(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the matrices in weights of a model by name; those of experts have the number of the expert appended.

    The kernel of a convolution is unfolded as (out, everything else), like other weights of more than three dimensions.
    A three-dimensional weight with a first dimension of 1 is a table, and a vector if two of its dimensions are 1.
    Vectors are omitted.
    """
    convolutions = convolution_parameters(model)
    parameters = dict(model.named_parameters())
    matrices: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim != 3 or id(parameters.get(name)) in convolutions:
            if weight.ndim > 1:
                matrices[name] = weight.flatten(start_dim=1)
        elif len(weight) > 1:
            matrices |= {f"{name}.{expert}": matrix for expert, matrix in enumerate(weight)}
        elif min(weight.shape[1:]) > 1:
            matrices[name] = weight[0]
    return matrices
