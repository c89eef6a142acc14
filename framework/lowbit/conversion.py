"""In-place conversion of a model to low-precision matrix products, and back."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..errors import RunNotice, UsageError, listed, nearest, require, warn
from ..names import as_names
from .linear import BitLinear, make_bit_linear, make_plain_linear
from .matrices import CastNames, Matrix, cast_names, castable_matrices
from .products import CastingModule, convert_products, restore_products
from .recipes import Recipe, find_recipe

Patterns = str | Sequence[str]


def quantize_model(
    model: nn.Module, recipe: Recipe | str, *, include: Patterns = ("*",), exclude: Patterns = (), seed: int = 0
) -> CastNames:
    """Cast the operands of a model's matrix products, in place, and return the names of the matrices.

    Converts linear layers, ``Conv1D``, the projections of ``nn.MultiheadAttention`` and experts; see
    :func:`.castable_matrices`. The returned list also contains the share of the model that is cast. A notice reports a
    small share, and a head that is tied to an embedding.

    Layers, parameters, their names and the keys of the ``state_dict`` do not change, so checkpoints load into both
    forms; :func:`dequantize_model` reverts the conversion. Call it before ``fully_shard``. A module that reads a linear
    layer's weight instead of calling the layer still computes in full precision. Metis splits only weights of linear
    layers. Several matrices in one parameter share one scaling history.

    Args:
        model: any model.
        recipe: the casts, or the name of a recipe.
        include: patterns (``*``, ``?``, ``[...]``) of the names to convert.
        exclude: patterns of the names to leave in full precision.
        seed: the seed of the generator for stochastic rounding, which all casts share.

    Raises:
        UsageError: if the recipe is unknown, a pattern matches nothing, no matrix is left to convert, a matrix is cast
            already, or the rank of Metis exceeds that of a weight.
    """
    resolved_recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    chosen = layers_to_quantize(model, resolved_recipe, include=include, exclude=exclude)
    matrices, splittable_names = castable_matrices(model), _names_with_unshared_weight(model)
    generator = torch.Generator().manual_seed(seed)
    for name in chosen:
        owner, key = matrices[name].owner, matrices[name].key
        if key:
            convert_products(owner, key, resolved_recipe, generator)
        else:
            assert isinstance(owner, nn.Linear)
            make_bit_linear(owner, resolved_recipe, generator, may_split=name in splittable_names)
    _disable_encoder_fast_path(model)
    names = cast_names(model, chosen)
    for note in names.notes() if resolved_recipe.casts else []:
        warn(note, RunNotice, stacklevel=2)
    return names


def layers_to_quantize(
    model: nn.Module, recipe: Recipe, *, include: Patterns = ("*",), exclude: Patterns = ()
) -> list[str]:
    """Return the names of the matrices that :func:`quantize_model` would cast; raises the same errors."""
    layers = castable_matrices(model)
    chosen = recipe.layers_to_cast(_chosen_names(layers, include, exclude))
    metis = recipe.metis
    if metis is not None and metis.forward:
        splittable_names = _names_with_unshared_weight(model)
        for name in [name for name in chosen if name in splittable_names and not layers[name].key]:
            # Gradients are not checked: one with few tokens, hence few rows, is decomposed at full rank.
            rows, columns = layers[name].weight.shape
            if metis.rank > min(rows, columns):
                raise UsageError(
                    f"The rank of Metis is {metis.rank}, but the weight of {name!r} is a {rows} x {columns} matrix; "
                    f"choose at most {min(rows, columns)}, a share such as 0.25, or exclude the layer."
                )
    return chosen


def dequantize_model(model: nn.Module) -> list[str]:
    """Restore full precision for every product, in place, and return the names of the matrices."""
    cast_matrices = {name: matrix for name, matrix in castable_matrices(model).items() if matrix.layer is not None}
    for module in {id(matrix.owner): matrix.owner for matrix in cast_matrices.values()}.values():
        if isinstance(module, BitLinear):
            make_plain_linear(module)
        elif isinstance(module, CastingModule):
            restore_products(module)
        # Private: torch removes a hook through its handle, but the handle of a model does not apply to its copies.
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _require_call]:
            del module._forward_pre_hooks[key]
    return list(cast_matrices)


def _disable_encoder_fast_path(model: nn.Module) -> None:
    """Make torch's encoders call their layers in evaluation, too.

    Their fast path multiplies by the weights directly; torch does not use it if a layer has a forward hook. The encoder
    then does not convert padded inputs to nested tensors, either.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            for layer in module.children():
                hooks = layer._forward_pre_hooks.values()
                if isinstance(layer, (BitLinear, CastingModule)) and _require_call not in hooks:
                    layer.register_forward_pre_hook(_require_call)
        elif isinstance(module, nn.TransformerEncoder):
            has_casts = any(isinstance(part, BitLinear) for part in module.modules())
            module.use_nested_tensor = module.use_nested_tensor and not has_casts


def _require_call(layer: nn.Module, inputs: object) -> None:
    """Do nothing: torch calls a layer with a hook, even if it has a fast path around the layer."""


def _names_with_unshared_weight(model: nn.Module) -> set[str]:
    """Return the names of the modules whose weight no other module uses; only those can be split."""
    # ``model.parameters()`` would yield a shared parameter only once.
    weights = [(name, vars(module)["_parameters"].get("weight")) for name, module in model.named_modules()]
    uses = Counter(id(parameter) for module in model.modules() for parameter in vars(module)["_parameters"].values())
    return {name for name, weight in weights if weight is not None and uses[id(weight)] == 1}


def _chosen_names(layers: Mapping[str, Matrix], include: Patterns, exclude: Patterns) -> list[str]:
    """Return the names of the matrices to cast; raises :class:`UsageError` if the patterns do not fit the model."""
    if not layers:
        raise UsageError(
            "The model has no linear layer (nn.Linear itself, no subclass), nn.MultiheadAttention, Conv1D or experts, "
            "so there is nothing to cast."
        )
    include, exclude = as_names(include), as_names(exclude)
    names = listed([repr(name) for name in layers])
    for pattern in (*include, *exclude):
        if not _matching(layers, [pattern]):
            suggestion = nearest(pattern, layers)
            raise UsageError(f"No linear layer's name matches {pattern!r}.{suggestion} Linear layers: {names}.")
    chosen = [name for name in _matching(layers, include) if name not in _matching(layers, exclude)]
    require(bool(chosen), f"No linear layer is left: the patterns to exclude match all of {names}.")
    for name in chosen:
        layer = layers[name].layer
        if layer is not None:
            raise UsageError(
                f"The layer {name!r} is low-bit already, by recipe {layer.recipe.name!r}; call dequantize_model first."
            )
    return chosen


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
