"""The rollouts that a training script holds in its variables, and whether its returns stop at the ends of episodes."""

import re
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

MOST_NUMBERS = 2**16
"""Numbers of a variable that is read."""
LEAST_STEPS = 5
"""Steps of a rollout; those of A2C have 5 to 20, of several environments."""
LEAST_ROWS = 16
"""Different steps within episodes from which a recursion is known."""
LEAST_ENDS = 3
"""Ends of episodes, each with other numbers."""
TOLERANCE = 1e-4
"""Deviation from a recursion that rounding causes, in standard deviations."""
LEAST_CARRIED = 0.1
"""Part of the next step that a recursion carries; usual are 0.9 to 1."""
CARRIED = (0, 3)
"""Columns of the fit with the result and the value of the next step."""
NAMES = {
    kind: re.compile(rf"_?(.*_)?({words})(_.*)?", re.IGNORECASE)
    for kind, words in {
        "rewards": "rewards?|rews?|rs?",
        "ends": "dones?|terminateds?|terminations?|terminals?|episode_ends?|ends?",
        "values": "values?|vals?|vs?",
        "targets": "returns?|rets?|advantages?|advs?|gaes?|targets?|gs?",
    }.items()
}
"""Names of variables."""


class Rollout(NamedTuple):
    """A variable with one number for each step, shape (steps, environments), float64."""

    kind: str
    numbers: Tensor


def returns_through_ends(variables: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Return whether the recursion of returns or advantages continues where episodes end; empty if it is unknown.

    Returns, advantages of GAE and those of n steps, normalised or not, are affine functions of the reward, the value,
    and value and result of the next step. The coefficients are fitted to steps within episodes.

    >>> rewards, returns = torch.rand(64).tolist(), [0.0] * 65
    >>> for step in reversed(range(64)):
    ...     returns[step] = rewards[step] + 0.9 * returns[step + 1]
    >>> dones = [step % 9 == 8 for step in range(64)]
    >>> returns_through_ends([("rewards", rewards), ("returns", returns[:64]), ("dones", dones)])
    {'returns_through_ends': 1.0}
    """
    found = [*_series(variables)]
    by_kind = {kind: [one.numbers for one in found if one.kind == kind] for kind in NAMES}
    is_known = False
    for ends in by_kind["ends"]:
        if not bool(((ends == 0) | (ends == 1)).all()) or float(ends[:-2].sum()) < LEAST_ENDS:
            continue
        for targets in by_kind["targets"]:
            if targets.shape != ends.shape:
                continue
            for rewards in (one for one in by_kind["rewards"] if one.shape == ends.shape):
                # A last value is often appended.
                fitting = [one[: len(ends)] for one in by_kind["values"] if one[: len(ends)].shape == ends.shape]
                pairs = [
                    (targets, None),
                    *((targets, one) for one in fitting),
                    *((targets - one, one) for one in fitting),
                ]
                for wanted, values in pairs:
                    is_continued = _continues(wanted, rewards, values, ends > 0)
                    if is_continued:
                        return {"returns_through_ends": 1.0}
                    is_known = is_known or is_continued is not None
    return {"returns_through_ends": 0.0} if is_known else {}


def _continues(targets: Tensor, rewards: Tensor, values: Tensor | None, ends: Tensor) -> bool | None:
    """Return whether rows at the ends of episodes follow from the next ones; ``None`` if rows within do not either.

    An end may be noted at the last step of an episode or at the first one of the next, so the rows at both are left out
    of the fit. Those at one follow with what the result or the value of the next step gives, or with both; those at the
    other are rows within an episode.
    """
    columns = [targets[1:], rewards[:-1], torch.ones_like(rewards[:-1])]
    if values is not None:
        columns += [values[1:], values[:-1]]
    rows = torch.stack(columns, -1).reshape(-1, len(columns))
    wanted, spread = targets[:-1].reshape(-1), targets[:-1].std()
    places = [ends[:-1].reshape(-1), ends[1:].reshape(-1)]
    at_ends = places[0] | places[1]
    if not bool(torch.isfinite(rows).all()) or not float(spread) > 0:
        return None
    if _different(rows[~at_ends]) < LEAST_ROWS or min(_different(rows[place]) for place in places) < LEAST_ENDS:
        return None
    scales = rows.abs().amax(0).clamp_min(1e-12)
    solution = torch.linalg.lstsq(rows[~at_ends] / scales, wanted[~at_ends, None], driver="gelsd").solution
    weights, limit = solution[:, 0] / scales, float(TOLERANCE * spread)
    follows = (rows @ weights - wanted).abs() <= limit
    if not bool(follows[~at_ends].all()):
        return None
    carried = [rows[:, index] * weights[index] for index in CARRIED if index < len(columns)]
    for place in places:
        if not bool(follows[at_ends & ~place].all()):
            continue
        for left_out in (torch.zeros_like(wanted), *carried[: len(carried) // 2 * 2]):
            rest = sum(carried) - left_out
            is_followed = (rows @ weights - left_out - wanted).abs() <= limit
            is_carried = (rest.abs() > LEAST_CARRIED * spread)[place].double().mean() > LEAST_CARRIED
            if bool(is_followed[place].all()) and bool(is_carried) and _is_recursion(weights):
                return True
    return False


def _is_recursion(weights: Tensor) -> bool:
    """Return whether the next step counts as it does with a discount: periodic rewards have other fits."""
    return float(weights[[index for index in CARRIED if index < len(weights)]].sum()) > LEAST_CARRIED


def _different(rows: Tensor) -> int:
    return len(torch.unique(rows, dim=0))


def _series(variables: Iterable[tuple[str, Any]]) -> Iterator[Rollout]:
    """Yield the variables, and the attributes and entries of them, that hold a rollout."""
    seen: set[int] = set()
    for name, item in with_attributes(variables):
        if id(item) in seen:
            continue
        kinds = [kind for kind, pattern in NAMES.items() if pattern.fullmatch(name)]
        if len(kinds) == 1 and (numbers := _numbers(item)) is not None:
            seen.add(id(item))
            yield Rollout(kinds[0], numbers)


def with_attributes(variables: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of variables, and of the attributes and entries of each."""
    for name, value in variables:
        inner = value if type(value) is dict else _attributes(value)
        yield from ((key, item) for key, item in [(name, value), *inner.items()] if isinstance(key, str))


def _attributes(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object of the script, without a call of its methods, as proxies have them."""
    kind = type(value)
    if issubclass(kind, (nn.Module, ModuleType, FunctionType, type)) or kind.__module__.startswith(
        ("torch.", "loopscope.")
    ):
        return {}
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


def _numbers(value: Any) -> Tensor | None:
    """Return a list, array or tensor of numbers, shape (steps, environments); ``None`` for other variables."""
    if isinstance(value, (list, tuple)):
        if not LEAST_STEPS <= len(value) <= MOST_NUMBERS:
            return None
        if all(isinstance(item, (bool, int, float, np.number, np.bool_)) for item in value):
            numbers = torch.tensor([float(item) for item in value], dtype=torch.float64, device="cpu")
        elif all(isinstance(item, (Tensor, np.ndarray)) for item in value):
            rows = [_numbers_of(item) for item in value]
            known = [row.reshape(-1) for row in rows if row is not None]
            if len(known) < len(rows) or len({len(row) for row in known}) != 1:
                return None
            numbers = torch.stack(known)
        else:
            return None
    elif isinstance(value, (Tensor, np.ndarray)):
        whole = _numbers_of(value)
        if whole is None or not whole.ndim or len(whole) < LEAST_STEPS:
            return None
        numbers = whole
    else:
        return None
    numbers = numbers.reshape(len(numbers), -1)
    return numbers if LEAST_ROWS < numbers.numel() <= MOST_NUMBERS else None


def _numbers_of(value: Any) -> Tensor | None:
    if isinstance(value, np.ndarray):
        return torch.tensor(value, dtype=torch.float64, device="cpu") if value.dtype.kind in "fiub" else None
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.device.type == "cpu"
    is_plain = is_plain and not value.is_complex() and not value.is_quantized and value.numel() <= MOST_NUMBERS
    return value.detach().double() if is_plain else None
