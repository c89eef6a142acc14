"""Finds the blocks of a model: stacks of modules of one class that run one after another."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

SMALLEST_STACK = 2


@dataclass(frozen=True)
class Chain:
    """Modules that run one after another, by their names in the model, first to last."""

    name: str
    """The container's name in the model (``model`` if it is the model itself), or the pattern that found them."""
    blocks: tuple[str, ...]

    @property
    def transitions(self) -> tuple[tuple[str, str], ...]:
        """Each block but the last with its successor."""
        return tuple(zip(self.blocks[:-1], self.blocks[1:], strict=True))


def find_chains(model: nn.Module, patterns: str = "") -> list[Chain]:
    """Return the chains of blocks of a model, none if it has none.

    Without patterns: every ``nn.ModuleList`` and ``nn.Sequential`` with at least two members of one class that have
    parameters. The members of the class that has most are the blocks (of two as frequent, the first one's); what lies
    inside a block is not looked at, so that the outermost stack counts; encoder and decoder are chains of their own.

    Args:
        model: the model.
        patterns: globs on the names of modules, separated by commas; each makes one chain of what fits it, in the order
            of the model. ``*`` and ``?`` stop at dots: ``blocks.*`` fits ``blocks.0`` but not ``blocks.0.attention``.
    """
    if patterns.strip():
        found = [Chain(glob, tuple(_fitting(model, glob))) for glob in map(str.strip, patterns.split(",")) if glob]
        return [chain for chain in found if len(chain.blocks) >= SMALLEST_STACK]
    return list(_stacks(model, ""))


def _fitting(model: nn.Module, glob: str) -> Iterator[str]:
    wanted = glob.split(".")
    for name, _ in model.named_modules():
        parts = name.split(".")
        if name and len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield name


def _stacks(module: nn.Module, name: str) -> Iterator[Chain]:
    blocks = _blocks(module) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
    if blocks:
        yield Chain(name or "model", tuple(_joined(name, block) for block in blocks))
    for child_name, child in module.named_children():
        if child_name not in blocks:
            yield from _stacks(child, _joined(name, child_name))


def _blocks(container: nn.Module) -> list[str]:
    """Name the members of the most frequent class of members with parameters, if there are two of them."""
    classes: dict[type[nn.Module], list[str]] = {}
    for name, member in container.named_children():
        if next(member.parameters(), None) is not None:
            classes.setdefault(_class_of(member), []).append(name)
    most: list[str] = max(classes.values(), key=len, default=[])
    return most if len(most) >= SMALLEST_STACK else []


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module as it was written: FSDP2 replaces it by one derived from it."""
    return next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.distributed.fsdp"))


def _joined(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child
