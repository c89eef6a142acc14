"""Groups of runs with equal settings, which differ only in their seeds."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import shortened
from .runs import RunRecord, differences

FEW = 3
"""At most this many options name a group of a strategy."""


def groups_of(records: Mapping[str, RunRecord]) -> dict[str, str]:
    """Return the name of each run's group: its strategy, and the options that distinguish it within the strategy."""
    identities = {label: _identity(record) for label, record in records.items()}
    keys = {label: json.dumps(identity, sort_keys=True, default=str) for label, identity in identities.items()}
    rivals: dict[str, list[dict[str, Any]]] = {}
    for identity in dict(zip(keys.values(), identities.values(), strict=True)).values():
        rivals.setdefault(identity["strategy"], []).append(identity)
    counts = {strategy: _count_differing(same) for strategy, same in rivals.items()}
    names: dict[str, str] = {}
    groups: dict[str, str] = {}
    for label, identity in identities.items():
        key = keys[label]
        if key not in names:
            strategy = identity["strategy"]
            differing = _differing(identity, rivals[strategy], min(FEW, counts[strategy]))
            options = [f"{option} {shortened(str(identity.get(option)), 20)}" for option in differing]
            name = ", ".join([strategy, *options])
            names[key] = name if name not in names.values() else f"{name} ({len(names) + 1})"
        groups[label] = names[key]
    return groups


def _count_differing(identities: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of options that differ among identities."""
    first, names = identities[0], dict.fromkeys(name for identity in identities for name in identity)
    return sum(any(other.get(name) != first.get(name) for other in identities) for name in names)


def _differing(identity: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]], most: int) -> list[str]:
    """Return the first options in which an identity differs from one of its rivals."""
    names = dict[str, None]()
    for rival in rivals:
        if len(names) >= most:
            break
        names |= dict.fromkeys(item.name for item in differences(identity, rival))
    return [*names][:most]


def _identity(record: RunRecord) -> dict[str, Any]:
    settings = {**record.training, **record.config}
    config = {name: value for name, value in settings.items() if name not in ("seed", "output_dir", "name")}
    treatments = {name: record.hooks.get(name) for name in record.treatments}
    # The strategy of an attached run is the name of its folder, which may contain the seed.
    strategy = record.training.get("name", record.strategy)
    return {"experiment": record.experiment, **config, "strategy": strategy, "treatments": treatments}
