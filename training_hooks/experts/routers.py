"""The routers of a model's mixture-of-experts layers: their modules, and how their outputs are read."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from loopscope.errors import UnsuitableError, UsageError, listed, require
from loopscope.option_words import hook_option_text
from torch import nn

from .routing import Scores

HOOK = "moe_router"
NAMES = ("gate", "router", "gating", "wg")
"""Last parts of the names of routers, next to a module with experts."""
CLASSES = re.compile(r"Router$|TopK(Gate|Gating|Router)$", re.IGNORECASE)
"""Class names of routers."""
TOP_K = ("top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "k")
"""Attributes of routers, layers and configurations with the number of experts per token."""
SCORING = ("scoring_func", "score_function", "scoring_function", "score_func")
"""Attributes of routers, layers and configurations with the name of the function from logits to scores."""


@dataclass(frozen=True)
class Router:
    """One router: name of its module, experts per token (0: unknown), position of its logits, kind of its scores."""

    name: str
    top_k: int
    logits_index: int | None
    scores: Scores


def find_routers(model: nn.Module, patterns: Iterable[str] = (), top_k: int = 0, scores: str = "auto") -> list[Router]:
    """Return the routers of a model, in its order.

    They are the modules whose names match one of the ``patterns``. Without patterns they are those that a model of
    transformers declares, or else modules named like routers next to experts, or with a class named like a router.

    Raises:
        UsageError: a pattern matches no module.
        UnsuitableError: the model has no router, or one with an unknown number of experts per token.
    """
    modules = dict(model.named_modules())
    patterns = list(patterns)
    names: dict[str, int | None]
    for pattern in patterns:
        require(
            any(name and fnmatchcase(name, pattern) for name in modules),
            f"{HOOK}.routers has the pattern {pattern!r}, which matches no module; modules of the model are "
            f"{listed([name for name in modules if name], 6)}.",
        )
    if patterns:
        names = {name: None for name in modules if name and any(fnmatchcase(name, item) for item in patterns)}
    else:
        names = dict(_declared(model))
        names = names or {name: None for name in modules if _is_router(name, modules)}
    if not names:
        raise UnsuitableError(
            f"Hook {HOOK!r} needs a mixture of experts, but found no router in the model; name the modules that return "
            f"the router logits with {hook_option_text(HOOK, routers='GLOB')}."
        )
    routers = [_router(name, index, modules, model, top_k, scores) for name, index in names.items()]
    unclear = [item.name for item in routers if not item.top_k and isinstance(modules[item.name], nn.Linear)]
    if unclear:
        raise UnsuitableError(
            f"Hook {HOOK!r} does not find the number of experts per token of the routers {listed(unclear, 3)}, whose "
            f"outputs are logits only; set it with {hook_option_text(HOOK, top_k='K')}."
        )
    return routers


def _declared(model: nn.Module) -> Iterator[tuple[str, int | None]]:
    """Yield the modules that models of transformers declare as sources of router logits, with their positions."""
    for prefix, owner in model.named_modules():
        declared = getattr(type(owner), "_can_record_outputs", None)
        specs = declared.get("router_logits") if isinstance(declared, Mapping) else None
        for spec in specs if isinstance(specs, (list, tuple)) else [] if specs is None else [specs]:
            kind = getattr(spec, "target_class", spec)
            layer = getattr(spec, "layer_name", None)
            for name, module in owner.named_modules(prefix=prefix):
                in_layer = layer is None or f".{layer.strip('.')}." in f".{name}."
                if isinstance(kind, type) and isinstance(module, kind) and in_layer:
                    yield name, getattr(spec, "index", None)


def _is_router(name: str, modules: Mapping[str, nn.Module]) -> bool:
    parent, _, last = name.rpartition(".")
    if CLASSES.search(type(modules[name]).__name__):
        return True
    siblings = [child for child, _ in modules[parent].named_children()] if parent in modules else []
    return last in NAMES and any("expert" in child for child in siblings)


def _router(
    name: str, index: int | None, modules: Mapping[str, nn.Module], model: nn.Module, top_k: int, scores: str
) -> Router:
    module, parent = modules[name], modules.get(name.rpartition(".")[0])
    config = getattr(model, "config", None)
    owners = [module, parent, getattr(module, "config", None), getattr(config, "text_config", None), config]
    counts = [value for value in _attributes(owners, TOP_K) if type(value) is int and value > 0]
    if scores == "auto":
        # Routers with a bias for load balancing (DeepSeek-V3 and its followers) have sigmoid scores.
        has_bias = hasattr(module, "e_score_correction_bias") or hasattr(parent, "e_score_correction_bias")
        scores = "sigmoid" if has_bias or "sigmoid" in [*_attributes(owners, SCORING)] else "softmax"
    if scores not in ("softmax", "sigmoid"):
        raise UsageError(f"{HOOK}.scores is {scores!r}; it must be auto, softmax or sigmoid.")
    kind: Scores = "sigmoid" if scores == "sigmoid" else "softmax"
    return Router(name, top_k or (counts[0] if counts else 0), index, kind)


def _attributes(owners: Iterable[Any], names: Iterable[str]) -> Iterator[Any]:
    names = list(names)
    for owner in owners:
        for name in names:
            if owner is not None and hasattr(owner, name):
                yield getattr(owner, name)
