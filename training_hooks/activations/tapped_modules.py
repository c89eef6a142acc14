"""The modules whose outputs are measured: blocks, and activation functions."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from loopscope.errors import require
from torch import nn

from ..gradients import find_chains

_NOT_ELEMENTWISE = (nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax)


def is_activation(module: nn.Module) -> bool:
    """Return whether a module is an activation function, of torch or transformers."""
    origin = type(module).__module__
    in_torch = origin == "torch.nn.modules.activation" and not isinstance(module, _NOT_ELEMENTWISE)
    return in_torch or origin == "transformers.activations"


def activation_modules(model: nn.Module) -> list[str]:
    """Return the names of the activation functions of a model."""
    return [name for name, module in model.named_modules() if is_activation(module)]


def block_chains(model: nn.Module) -> Mapping[str, list[str]]:
    """Return the names of the blocks, the members of each stack in order, by the name of the stack."""
    return {stack: [*blocks] for stack, blocks in find_chains(model).items()}


def matching_modules(model: nn.Module, patterns: str, option: str) -> list[str]:
    """Return the names of the modules that match one of the globs, separated by commas.

    Raises:
        UsageError: a glob matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    globs = [glob for glob in map(str.strip, patterns.split(",")) if glob]
    for glob in globs:
        matches = any(fnmatchcase(name, glob) for name in names)
        first = ", ".join(map(repr, names[:3]))
        require(matches, f"{option} has the pattern {glob!r}, which matches no module; the first modules are {first}.")
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]
