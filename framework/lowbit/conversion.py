"""Makes the linear layers of a model low-bit layers, and back, in place."""

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..errors import UsageError, listed, nearest
from .linear import BitLinear, equip, strip
from .recipes import Recipe, find_recipe


def quantize_model(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    seed: int = 0,
) -> list[str]:
    """Make linear layers of a model low-bit layers, in place, and return their names.

    Layers, parameters, their names and the keys of the ``state_dict`` stay what they are, so that checkpoints are
    loadable both ways; :func:`dequantize_model` makes them plain again. Call it before ``fully_shard``. A module that
    reads a layer's weight instead of calling the layer, as ``nn.MultiheadAttention`` does, goes on in full precision.

    Args:
        model: any model; of its modules those are meant whose class is ``nn.Linear`` itself.
        recipe: the casts, or their name.
        include: patterns (``*``, ``?``, ``[...]``) of the names of the layers that are meant.
        exclude: patterns of names that are left alone.
        seed: of the generator of stochastic rounding, which all of these layers share.

    Raises:
        UsageError: an unknown recipe, a pattern that matches no linear layer, nothing left to change, a layer that is
            low-bit already, or a rank of Metis above a weight that it splits.
    """
    found = find_recipe(recipe) if isinstance(recipe, str) else recipe
    chosen = layers_to_quantize(model, found, include=include, exclude=exclude)
    alone = _with_a_weight_of_their_own(model)
    generator = torch.Generator().manual_seed(seed)
    for name in chosen:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        equip(layer, found, generator, may_split=name in alone)
    _have_encoders_call_their_layers(model)
    return chosen


def layers_to_quantize(
    model: nn.Module, recipe: Recipe, *, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()
) -> list[str]:
    """Return the names of the layers that :func:`quantize_model` would change, or raise what it would raise."""
    modules = model.named_modules()  # no other subclass of nn.Linear: its users might not call it
    layers = {name: each for name, each in modules if isinstance(each, BitLinear) or type(each) is nn.Linear}
    chosen = recipe.kept(_chosen(layers, include, exclude))
    metis = recipe.metis
    if metis is not None and metis.forward:
        alone = _with_a_weight_of_their_own(model)
        for name in chosen:
            # A gradient may be smaller: of few tokens, and so of few rows, it is decomposed completely.
            rows, columns = layers[name].weight.shape
            if name in alone and metis.rank > min(rows, columns):
                raise UsageError(
                    f"The rank of Metis is {metis.rank}, but the weight of {name!r} is a {rows} x {columns} matrix; "
                    f"choose at most {min(rows, columns)}, a share such as 0.25, or exclude the layer."
                )
    return chosen


def dequantize_model(model: nn.Module) -> list[str]:
    """Make every low-bit layer a plain ``nn.Linear`` again, in place, and return their names."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BitLinear)}
    for layer in layers.values():
        strip(layer)
        for key in [key for key, hook in layer._forward_pre_hooks.items() if hook is _be_called]:
            del layer._forward_pre_hooks[key]
    return list(layers)


def _have_encoders_call_their_layers(model: nn.Module) -> None:
    """Keep torch's encoders from their fast path, which in evaluation multiplies by the weights itself.

    It is not taken where a layer has a hook, and padding is then not cut out into nested tensors first.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            for layer in module.children():
                if isinstance(layer, BitLinear) and _be_called not in layer._forward_pre_hooks.values():
                    layer.register_forward_pre_hook(_be_called)
        elif isinstance(module, nn.TransformerEncoder) and any(
            isinstance(part, BitLinear) for part in module.modules()
        ):
            module.use_nested_tensor = False


def _be_called(layer: nn.Module, inputs: object) -> None:
    """Change nothing: a layer with this hook is called, wherever torch could do without."""


def _with_a_weight_of_their_own(model: nn.Module) -> set[str]:
    """Name the modules whose weight no other module uses: only those can be split."""
    # Not ``model.parameters()``, which yields a parameter that several modules share once.
    named = [(name, vars(module)["_parameters"].get("weight")) for name, module in model.named_modules()]
    uses = Counter(id(parameter) for module in model.modules() for parameter in vars(module)["_parameters"].values())
    return {name for name, weight in named if weight is not None and uses[id(weight)] == 1}


def _chosen(layers: dict[str, nn.Linear], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Return the names of the layers to change; raises :class:`UsageError` where the patterns do not suit."""
    if not layers:
        raise UsageError("The model has no linear layer (nn.Linear itself, no subclass), so there is nothing to cast.")
    names = listed([repr(name) for name in layers])
    for pattern in (*include, *exclude):
        if not _matching(layers, [pattern]):
            near = nearest(pattern, layers)
            raise UsageError(f"No linear layer's name matches {pattern!r}.{near} Linear layers: {names}.")
    chosen = [name for name in _matching(layers, include) if name not in _matching(layers, exclude)]
    if not chosen:
        raise UsageError(f"No linear layer is left: the patterns to exclude match all of {names}.")
    for name in chosen:
        layer = layers[name]
        if isinstance(layer, BitLinear):
            raise UsageError(
                f"The layer {name!r} is low-bit already, by recipe {layer.recipe.name!r}; call dequantize_model first."
            )
    return chosen


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
