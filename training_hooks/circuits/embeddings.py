"""Finding, by shape alone, the token embedding of a model, its output projection and its feed-forward neurons."""

from loopscope.errors import UnsuitableError, listed, unknown
from torch import nn


def first_embedding(model: nn.Module, hook: str) -> str:
    """Return the name of the first ``nn.Embedding``'s weight, or raise :class:`UnsuitableError` for ``hook``.

    One whose weight is computed from other parameters, by ``prune`` or ``weight_norm`` say, does not count.
    """
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, table in tables.items():
        if table._parameters.get("weight") is not None:
            return f"{name}.weight" if name else "weight"
    if tables:
        raise UnsuitableError(
            f"Hook {hook!r} needs a token embedding whose weight is a parameter, and that of {listed([*tables], 3)} is "
            f"computed from others, as by prune or weight_norm. Name a matrix with --hook-config {hook}.embedding=NAME."
        )
    kinds = [f"{name} ({type(module).__name__})" for name, module in model.named_modules() if name]
    raise UnsuitableError(
        f"Hook {hook!r} needs a token embedding, and the model has no nn.Embedding. Its modules: "
        f"{listed(kinds) or type(model).__name__}. Name a parameter with --hook-config {hook}.embedding=NAME."
    )


def matrix_named(model: nn.Module, name: str, option: str) -> nn.Parameter:
    """Return the matrix that ``option`` names; raises :class:`UsageError` if there is none of that name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name not in parameters:
        raise unknown("parameter", name, parameters)
    shape = tuple(parameters[name].shape)
    if len(shape) != 2:
        raise UnsuitableError(f"{option} is {name!r}, of shape {shape}; it must be a matrix (rows are tokens).")
    return parameters[name]


def first_name(model: nn.Module, name: str) -> str:
    """Return the name under which a parameter, here called ``name``, comes first: the one that gradients go by."""
    parameter = model.get_parameter(name)
    return next(first for first, other in model.named_parameters() if other is parameter)


def output_projection(model: nn.Module, embedding: str) -> str:
    """Return the name of the last ``nn.Linear``'s weight that has a row for each token, empty if there is none.

    A projection tied to the embedding does not count: it is the same matrix.
    """
    table = model.get_parameter(embedding)
    found = ""
    for name, module in model.named_modules():
        # not ``module.weight``, which a parametrised module computes at every access
        weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        if weight is not None and len(weight) == len(table) and weight is not table:
            found = f"{name}.weight" if name else "weight"
    return found


def feed_forward_inputs(model: nn.Module) -> list[str]:
    """Return the names of the linear layers that widen, and whose widening a linear layer beside them takes back.

    >>> feed_forward_inputs(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(2, 5)))
    ['0']
    """
    found = []
    for name, module in model.named_modules():
        layers = {child: layer for child, layer in module.named_children() if isinstance(layer, nn.Linear)}
        shapes = {(layer.in_features, layer.out_features) for layer in layers.values()}
        for child, layer in layers.items():
            if layer.out_features > layer.in_features and (layer.out_features, layer.in_features) in shapes:
                found.append(f"{name}.{child}" if name else child)
    return found
