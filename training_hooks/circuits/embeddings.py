"""Search for a model's token embedding, output projection and feed-forward layers, by class and shape."""

from loopscope.errors import UnsuitableError, listed, unknown
from loopscope.option_words import hook_option_text
from torch import nn


def first_embedding(model: nn.Module, hook: str) -> str:
    """Return the name of the first ``nn.Embedding``'s weight.

    Embeddings whose weight is computed from other parameters, for example by ``prune`` or ``weight_norm``, are skipped.

    Raises:
        UnsuitableError: the model has no such embedding; the message is about ``hook``.
    """
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, table in tables.items():
        # ``_parameters`` lacks a computed weight, which ``table.weight`` would compute.
        if table._parameters.get("weight") is not None:
            return f"{name}.weight" if name else "weight"
    if tables:
        raise UnsuitableError(
            f"Hook {hook!r} needs a token embedding whose weight is a parameter, but the weight of "
            f"{listed([*tables], 3)} is computed from others, as by prune or weight_norm. "
            f"Name a matrix with {hook_option_text(hook, embedding='NAME')}."
        )
    kinds = [f"{name} ({type(module).__name__})" for name, module in model.named_modules() if name]
    raise UnsuitableError(
        f"Hook {hook!r} needs a token embedding, but the model has no nn.Embedding. Its modules: "
        f"{listed(kinds) or type(model).__name__}. Name a parameter with {hook_option_text(hook, embedding='NAME')}."
    )


def find_matrix(model: nn.Module, name: str, option: str) -> nn.Parameter:
    """Return the matrix ``name``, the value of ``option``.

    Raises:
        UsageError: the model has no parameter of this name.
        UnsuitableError: the parameter is not a matrix.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name not in parameters:
        raise unknown("parameter", name, parameters)
    shape = tuple(parameters[name].shape)
    if len(shape) != 2:
        raise UnsuitableError(f"{option} is {name!r}, of shape {shape}; it must be a matrix (rows are tokens).")
    return parameters[name]


def first_name(model: nn.Module, name: str) -> str:
    """Return the first name of the parameter that is also called ``name``; gradients are listed under this name."""
    parameter = model.get_parameter(name)
    return next(first for first, candidate in model.named_parameters() if candidate is parameter)


def output_projection(model: nn.Module, embedding: str) -> str:
    """Return the name of the last ``nn.Linear`` weight with a row for each token, or an empty string.

    A projection tied to the embedding is skipped, since it is the same matrix.
    """
    table = model.get_parameter(embedding)
    projection = ""
    for name, module in model.named_modules():
        # Not ``module.weight``, which a parametrised module computes at every access.
        weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        if weight is not None and len(weight) == len(table) and weight is not table:
            projection = f"{name}.weight" if name else "weight"
    return projection


def feed_forward_inputs(model: nn.Module) -> list[str]:
    """Return the names of linear layers that widen, and that have a sibling with the transposed shape.

    >>> feed_forward_inputs(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(2, 5)))
    ['0']
    """
    names = []
    for name, module in model.named_modules():
        layers = {child: layer for child, layer in module.named_children() if isinstance(layer, nn.Linear)}
        shapes = {(layer.in_features, layer.out_features) for layer in layers.values()}
        for child, layer in layers.items():
            if layer.out_features > layer.in_features and (layer.out_features, layer.in_features) in shapes:
                names.append(f"{name}.{child}" if name else child)
    return names
