"""Start-up facts: properties of model and optimizer before the first step that may show a mistake."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..tensors import is_uninitialised, local_shards

MOST_NAMES = 8
"""Names in a list of facts."""
MOST_GROUPS = 16
MOST_HELD = 1024
"""Items of a list up to which it is searched for layers."""
MOST_COMPARED = 64
"""Parameters of one shape with which another one is compared."""
LARGEST_COMPARED = 2**27
"""Elements of a tensor up to which values are read: reading larger ones would delay the start."""
LEAST_COMPARED = 64
"""Elements from which on a weight is compared with an initialisation."""
BATCH_NORMS = nn.modules.batchnorm._BatchNorm
NORMS = (nn.LayerNorm, nn.GroupNorm, BATCH_NORMS, nn.RMSNorm)


def start_facts(model: nn.Module, optimizers: Sequence[Optimizer], others: Iterable[nn.Module] = ()) -> dict[str, Any]:
    """Return the start-up facts of a training as plain values.

    Args:
        model: the trained model.
        optimizers: all optimizers of the training.
        others: modules outside of the model that the optimizers may train, too.
    """
    parameters = dict(model.named_parameters())
    trainable = {name: item for name, item in parameters.items() if item.requires_grad}
    return {
        "model": type(model).__qualname__,
        "parameters": len(parameters),
        "trainable": len(trainable),
        "elements": sum(item.numel() for item in parameters.values()),
        "trainable_elements": sum(item.numel() for item in trainable.values()),
        "frozen_modules": _frozen_modules(model),
        "dtypes": dict(Counter(str(item.dtype).removeprefix("torch.") for item in parameters.values())),
        "groups": _groups(optimizers),
        **_membership(model, trainable, optimizers, others),
        **_modes(model),
        "unregistered": _unregistered(model, optimizers, others),
        "matrices": sum(item.ndim > 1 for item in trainable.values()),
        "constant_matrices": _names(name for name, item in trainable.items() if _is_constant_matrix(item)),
        "zero_matrices": sum(_is_zero(item) for item in trainable.values() if item.ndim > 1),
        "untied_copies": _untied_copies(model),
        "weight_scales": _weight_scales(model),
        "rounded_away": _rounded_away(trainable, optimizers),
        "frozen_untrained": _frozen_untrained(model),
    }


def _names(names: Iterable[str]) -> dict[str, Any]:
    """Return the number of names, and the first of them."""
    all_names = list(names)
    return {"count": len(all_names), "names": all_names[:MOST_NAMES]}


def _entries(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return what the parameter groups of all optimizers hold."""
    return [item for group in _all_groups(optimizers) for item in group["params"]]


def _all_groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _frozen_modules(model: nn.Module) -> dict[str, float]:
    """Return the share of frozen elements of each child of the model that has any."""
    shares = {}
    for name, child in model.named_children():
        frozen = sum(item.numel() for item in child.parameters() if not item.requires_grad)
        if frozen:
            shares[name] = frozen / sum(item.numel() for item in child.parameters())
    return dict(list(shares.items())[: 2 * MOST_NAMES])


def _groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Return the parameter groups with their plain options."""
    groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = {name: _plain(value) for name, value in group.items() if name != "params"}
            tensors = [item for item in group["params"] if isinstance(item, Tensor) and not is_uninitialised(item)]
            sizes = {"tensors": len(tensors), "elements": sum(item.numel() for item in tensors)}
            plain = {name: value for name, value in options.items() if value is not None}
            groups.append({"optimizer": type(optimizer).__name__} | sizes | plain)
    return groups[:MOST_GROUPS]


def _plain(value: Any) -> Any:
    """Return a number, a text or a tuple of numbers as plain values, ``None`` for other options."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, (tuple, list)) and all(isinstance(item, (int, float)) for item in value):
        return list(value)
    return value if isinstance(value, (int, float, str, bool)) else None


def _membership(
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    optimizers: Sequence[Optimizer],
    others: Iterable[nn.Module],
) -> dict[str, Any]:
    """Compare the parameters of the model with those of the optimizers."""
    entries, parameters, placeholders = _entries(optimizers), dict(model.named_parameters()), _placeholders(model)
    decays = {id(item): group.get("weight_decay") for group in _all_groups(optimizers) for item in group["params"]}
    held = {*map(id, entries)}
    known = {*map(id, parameters.values())} | {id(item) for module in others for item in module.parameters()}
    missing = {name: item for name, item in trainable.items() if id(item) not in held}
    decayed = [name for name, item in trainable.items() if item.ndim <= 1 and _is_positive(decays.get(id(item)))]
    elements = sum(item.numel() for item in trainable.values())
    share = sum(item.numel() for item in missing.values()) / elements if elements else 0.0
    copies = _copies(missing.values(), [item for item in trainable.values() if id(item) in held])
    frozen = {name: id(item) for name, item in parameters.items() if not item.requires_grad}
    return {
        "without_optimizer": _names(missing) | {"share": share, "copies": copies},
        "foreign_in_optimizer": sum(id(item) not in known for item in entries),
        "frozen_in_optimizer": _names(name for name, key in frozen.items() if key in held and key not in placeholders),
        "decayed_vectors": _names(decayed),
    }


def _copies(parameters: Iterable[Tensor], others: Sequence[Tensor]) -> int:
    """Return how many parameters nearly equal another one, as those of target networks and averages do at first."""
    alike: dict[Any, list[Tensor]] = {}
    for item in others:
        alike.setdefault((item.shape, item.dtype, item.device), []).append(item)
    kinds = ((item, (item.shape, item.dtype, item.device)) for item in parameters if _is_readable(item))
    pairs = [(item, alike.get(kind, [])[:MOST_COMPARED]) for item, kind in kinds]
    return sum(any(_are_near(item, one) for one in same) for item, same in pairs)


def _are_near(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors differ by less than a hundredth of their size, as a moving average and its source."""
    one, other = _values(first), _values(second)
    return torch.equal(one, other) or bool((one - other).float().norm() < 0.01 * one.float().norm())


def _placeholders(model: nn.Module) -> set[int]:
    """Return the identities of frozen parameters that a later step of the training fills.

    They are those of modules with several matrices in which every parameter is frozen and zero, such as the factors of
    a product: even if they were trained, none of them would get a gradient.
    """
    placeholders: set[int] = set()
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        is_frozen = sum(item.ndim > 1 for item in own) > 1 and not any(item.requires_grad for item in own)
        if is_frozen and all(map(_is_zero, own)):
            placeholders |= {*map(id, own)}
    return placeholders


def _unregistered(model: nn.Module, optimizers: Sequence[Optimizer], others: Iterable[nn.Module]) -> dict[str, Any]:
    """Return attributes of the model that hold trainable tensors which neither it nor an optimizer knows.

    They are lists, tuples and dicts of modules, and plain tensors that require a gradient.
    """
    known = {id(item) for module in (model, *others) for item in module.parameters()}
    known |= {*map(id, _entries(optimizers))}
    sizes: dict[str, int] = {}
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_"):  # torch's own registers, and attributes that hide a module on purpose
                continue
            unknown = {id(item): item.numel() for item in _held(value) if id(item) not in known}
            if unknown:
                sizes[f"{prefix}.{attribute}".removeprefix(".")] = sum(unknown.values())
    elements = sum(sizes.values())
    registered = sum(item.numel() for item in model.parameters())
    share = elements / max(elements + registered, 1)
    return _names(sizes) | {"elements": elements, "share": share}


def _held(value: Any) -> list[Tensor]:
    """Return the trainable tensors of modules in a container, or a plain trainable tensor, which nothing registers."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad and value.is_leaf else []
    if not isinstance(value, (list, tuple, dict)) or len(value) > MOST_HELD:
        return []
    items = list(value.values() if isinstance(value, dict) else value)
    if len(items) == 1 and isinstance(items[0], nn.Module):  # the usual way to hide a teacher or an average
        return []
    held: list[Tensor] = []
    for item in items:
        if isinstance(item, nn.Module):
            held += [one for one in item.parameters() if one.requires_grad and not is_uninitialised(one)]
        elif isinstance(item, (Tensor, list, tuple)):
            held += _held(item)
    return held


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _modes(model: nn.Module) -> dict[str, Any]:
    """Return which modules are in eval mode, and the kinds of layers that modes affect."""
    modules = dict(model.named_modules())
    norms = {name: item for name, item in modules.items() if isinstance(item, BATCH_NORMS)}
    idle = {name: item for name, item in norms.items() if not item.training}
    fresh = [name for name, item in idle.items() if _has_initial_statistics(item)]
    fixed = [name for name, item in norms.items() if item.track_running_stats and item.momentum == 0]
    dropouts = [item for item in modules.values() if isinstance(item, nn.modules.dropout._DropoutNd) and item.p > 0]
    return {
        "in_eval_mode": not model.training,
        "batchnorms": len(norms),
        "batchnorms_in_eval_mode": _names(name for name, item in idle.items() if _is_trained(item)),
        # In a frozen part nothing is trained.
        "batchnorms_never_trained": _names(name for name in fresh if _is_trained(modules[name.rpartition(".")[0]])),
        "batchnorms_without_updates": _names(fixed),
        "largest_batchnorm_momentum": max((float(item.momentum or 0) for item in norms.values()), default=0.0),
        "dropouts": len(dropouts),
        "dropouts_in_eval_mode": sum(not item.training for item in dropouts),
        "largest_dropout": max((float(item.p) for item in dropouts), default=0.0),
    }


def _has_initial_statistics(module: nn.Module) -> bool:
    """Return whether no batch has changed the running statistics of a batch normalisation."""
    count = getattr(module, "num_batches_tracked", None)
    if not isinstance(count, Tensor) or count.is_meta or int(count):
        return False
    mean, variance = module.running_mean, module.running_var
    if not isinstance(mean, Tensor) or not isinstance(variance, Tensor):
        return False
    return bool((mean == 0).all()) and bool((variance == 1).all())


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _is_readable(tensor: Tensor) -> bool:
    return not tensor.is_meta and 0 < tensor.numel() <= LARGEST_COMPARED and tensor.is_floating_point()


def _values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, of a sharded one those of this rank."""
    (values,) = local_shards([tensor.detach()])
    return values


def _is_constant_matrix(parameter: nn.Parameter) -> bool:
    """Return whether all elements of a matrix are equal, so that its units cannot become different."""
    if parameter.ndim < 2 or parameter.numel() < 2 or not _is_readable(parameter):
        return False
    values = _values(parameter)
    return values.numel() > 1 and bool((values.amax() == values.amin()).item())


def _is_zero(parameter: Tensor) -> bool:
    return _is_readable(parameter) and _values(parameter).numel() > 0 and not torch.count_nonzero(_values(parameter))


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield the names of modules whose weight is a parameter that is read, the modules and the weights.

    The attribute may be computed at every access, and then have side effects: ``spectral_norm`` updates its buffers.
    """
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and _is_readable(weight):
            yield name, module, weight


def _untied_copies(model: nn.Module) -> list[list[str]]:
    """Return pairs of an embedding and a linear layer with equal weights that are separate parameters.

    Pairs of linear layers are left out: ``nn.TransformerEncoder`` starts with copies of one layer by design.
    """
    trained = [(f"{name}.weight", module, weight) for name, module, weight in _weights(model) if weight.requires_grad]
    kinds = (nn.Embedding, nn.Linear)
    embeddings, linears = ([item for item in trained if isinstance(item[1], kind)] for kind in kinds)
    pairs = [
        [embedding, linear]
        for embedding, _, first in embeddings
        for linear, _, second in linears
        if first is not second and _are_equal(first, second)
    ]
    return pairs[:MOST_NAMES]


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two weights have equal values that are not all the same number."""
    one, other = _values(first), _values(second)
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device or not one.numel():
        return False
    return torch.equal(one, other) and bool((one.amax() != one.amin()).item())


def _weight_scales(model: nn.Module) -> dict[str, Any]:
    """Return the root mean square of weights in units of 1/√fan_in, its extremes and median, over linear layers.

    Weights that start at zero by design are left out.

    PyTorch's default is 0.58, the initialisation of He et al. (arXiv 1502.01852) 1.41.
    """
    scales = {}
    for name, module, weight in _weights(model):
        values = _values(weight)
        is_layer = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
        if is_layer and weight.requires_grad and values.numel() and not _is_zero(weight):
            # from the shape, since weight[0] of a sharded weight waits for ranks, whose shard may be empty
            fan_in = weight.shape[1:].numel() if weight.ndim > 1 else weight.numel()
            scales[f"{name}.weight"] = float(values.float().square().mean().sqrt()) * math.sqrt(fan_in)
    if not scales:
        return {}
    ordered = sorted(scales.items(), key=itemgetter(1))
    median = ordered[len(ordered) // 2][1]
    return {"count": len(ordered), "median": median, "smallest": list(ordered[0]), "largest": list(ordered[-1])}


UNIFORM_PEAK = 3**0.5
"""Largest magnitude over the root mean square of uniform values around 0."""


def _frozen_untrained(model: nn.Module) -> dict[str, Any]:
    """Return the frozen layers whose values are those of an initialisation, and the number of all frozen layers.

    torch draws the weights of its layers uniformly around 0: their largest magnitude is √3 times the root mean square,
    which no training keeps. A copy of a trained layer, such as a momentum encoder, is not untrained.
    """
    layers = 0
    trained = [item for item in model.parameters() if item.requires_grad and _is_readable(item)]
    untrained = []
    for name, _, weight in _weights(model):
        values = _values(weight)
        if weight.requires_grad or weight.ndim < 2 or values.numel() < LEAST_COMPARED:
            continue
        layers += 1
        peak = float(values.abs().max() / values.float().square().mean().sqrt().clamp(min=1e-30))
        is_centred = abs(float(values.float().mean())) * values.numel() ** 0.5 < 4 * float(values.float().std())
        if is_centred and 0.95 * UNIFORM_PEAK < peak < 1.05 * UNIFORM_PEAK and not _copies([weight], trained):
            untrained.append(name)
    return _names(untrained) | {"layers": layers}


def _rounded_away(trainable: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the share of 16-bit weights whose expected Adam update, of the learning rate, is below half an ulp."""
    rates: dict[int, float] = {}
    for group in _all_groups(optimizers):
        lr = group.get("initial_lr", group.get("lr"))
        lr = float(lr) if isinstance(lr, (int, float)) or (isinstance(lr, Tensor) and lr.numel() == 1) else math.nan
        rates |= {id(item): lr for item in group["params"]}
    lost = total = 0
    for parameter in trainable.values():
        rate = rates.get(id(parameter), math.nan)
        if parameter.dtype in (torch.bfloat16, torch.float16) and rate > 0 and _is_readable(parameter):
            values = _values(parameter)
            half_ulp = values.float().abs() * torch.finfo(parameter.dtype).eps / 4  # a mean over the mantissa
            lost += int((half_ulp > rate).sum())
            total += values.numel()
    return {"share": lost / total, "elements": total} if total else {}
