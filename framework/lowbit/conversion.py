"""Has the products of a model's matrices cast, and puts them back, in place."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..errors import RunNotice, UsageError, listed, nearest, require
from .linear import BitLinear, equip, strip
from .matrices import CastNames, Matrix, cast_names, known_matrices
from .products import CastsProducts, cast_products, leave_products
from .recipes import Recipe, find_recipe

Patterns = Sequence[str]


def quantize_model(
    model: nn.Module, recipe: Recipe | str, *, include: Patterns = ("*",), exclude: Patterns = (), seed: int = 0
) -> CastNames:
    """Have the products of a model's matrices cast, in place, and return the names of the matrices.

    Meant are linear layers, ``Conv1D``, the projections of ``nn.MultiheadAttention`` and experts, as
    :func:`.known_matrices` says. What is returned is a list, which also knows what share of the model is cast; a note
    tells if that is small, or if a head is tied to an embedding.

    Layers, parameters, their names and the keys of the ``state_dict`` stay what they are, so that checkpoints are
    loadable both ways; :func:`dequantize_model` undoes it. Call it before ``fully_shard``. A module that reads a linear
    layer's weight instead of calling the layer goes on in full precision. Only weights of linear layers are split by
    Metis, and a module with several matrices in one parameter has one history for all of them.

    Args:
        model: any model.
        recipe: the casts, or their name.
        include: patterns (``*``, ``?``, ``[...]``) of the names that are meant.
        exclude: patterns of names that are left alone.
        seed: of the generator of stochastic rounding, which all casts share.

    Raises:
        UsageError: an unknown recipe, a pattern that matches nothing, nothing left to change, a matrix that is cast
            already, or a rank of Metis above a weight that it splits.
    """
    found = find_recipe(recipe) if isinstance(recipe, str) else recipe
    chosen = layers_to_quantize(model, found, include=include, exclude=exclude)
    known, alone = known_matrices(model), _with_a_weight_of_their_own(model)
    generator = torch.Generator().manual_seed(seed)
    for name in chosen:
        owner, key = known[name].owner, known[name].key
        if key:
            cast_products(owner, key, found, generator)
        else:
            assert isinstance(owner, nn.Linear)
            equip(owner, found, generator, may_split=name in alone)
    _have_encoders_call_their_layers(model)
    names = cast_names(model, chosen)
    for note in names.notes() if found.casts else []:
        warnings.warn(note, RunNotice, stacklevel=2)
    return names


def layers_to_quantize(
    model: nn.Module, recipe: Recipe, *, include: Patterns = ("*",), exclude: Patterns = ()
) -> list[str]:
    """Return the names of the matrices that :func:`quantize_model` would cast, or raise what it would raise."""
    layers = known_matrices(model)
    chosen = recipe.kept(_chosen(layers, include, exclude))
    metis = recipe.metis
    if metis is not None and metis.forward:
        alone = _with_a_weight_of_their_own(model)
        for name in [name for name in chosen if name in alone and not layers[name].key]:
            # A gradient may be smaller: of few tokens, and so of few rows, it is decomposed completely.
            rows, columns = layers[name].weight.shape
            if metis.rank > min(rows, columns):
                raise UsageError(
                    f"The rank of Metis is {metis.rank}, but the weight of {name!r} is a {rows} x {columns} matrix; "
                    f"choose at most {min(rows, columns)}, a share such as 0.25, or exclude the layer."
                )
    return chosen


def dequantize_model(model: nn.Module) -> list[str]:
    """Have every product made in full precision again, in place, and return the names of the matrices."""
    found = {name: matrix for name, matrix in known_matrices(model).items() if matrix.layer is not None}
    for module in {id(each.owner): each.owner for each in found.values()}.values():
        if isinstance(module, BitLinear):
            strip(module)
        elif isinstance(module, CastsProducts):
            leave_products(module)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _be_called]:
            del module._forward_pre_hooks[key]
    return list(found)


def _have_encoders_call_their_layers(model: nn.Module) -> None:
    """Keep torch's encoders from their fast path, which in evaluation multiplies by the weights itself.

    It is not taken where a layer has a hook, and padding is then not cut out into nested tensors first.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            for layer in module.children():
                hooks = layer._forward_pre_hooks.values()
                if isinstance(layer, (BitLinear, CastsProducts)) and _be_called not in hooks:
                    layer.register_forward_pre_hook(_be_called)
        elif isinstance(module, nn.TransformerEncoder):
            has_casts = any(isinstance(part, BitLinear) for part in module.modules())
            module.use_nested_tensor = module.use_nested_tensor and not has_casts


def _be_called(layer: nn.Module, inputs: object) -> None:
    """Change nothing: a layer with this hook is called, wherever torch could do without."""


def _with_a_weight_of_their_own(model: nn.Module) -> set[str]:
    """Name the modules whose weight no other module uses: only those can be split."""
    # Not ``model.parameters()``, which yields a parameter that several modules share once.
    named = [(name, vars(module)["_parameters"].get("weight")) for name, module in model.named_modules()]
    uses = Counter(id(parameter) for module in model.modules() for parameter in vars(module)["_parameters"].values())
    return {name for name, weight in named if weight is not None and uses[id(weight)] == 1}


def _chosen(layers: Mapping[str, Matrix], include: Patterns, exclude: Patterns) -> list[str]:
    """Return the names of the matrices to cast; raises :class:`UsageError` where the patterns do not suit."""
    if not layers:
        raise UsageError(
            "The model has no linear layer (nn.Linear itself, no subclass), nn.MultiheadAttention, Conv1D or experts, "
            "so there is nothing to cast."
        )
    names = listed([repr(name) for name in layers])
    for pattern in (*include, *exclude):
        if not _matching(layers, [pattern]):
            near = nearest(pattern, layers)
            raise UsageError(f"No linear layer's name matches {pattern!r}.{near} Linear layers: {names}.")
    chosen = [name for name in _matching(layers, include) if name not in _matching(layers, exclude)]
    require(bool(chosen), f"No linear layer is left: the patterns to exclude match all of {names}.")
    for name in chosen:
        layer = layers[name].layer
        if layer is not None:
            raise UsageError(
                f"The layer {name!r} is low-bit already, by recipe {layer.recipe.name!r}; call dequantize_model first."
            )
    return chosen


def _matching(names: Iterable[str], patterns: Patterns) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
