"""The sinks that the options of a run ask for."""

from collections.abc import Callable, Mapping
from typing import Any

from ..hooks import MetricSink, SinkRegistry
from .parser import flag_name


def wanted_sinks(options: Mapping[str, Any]) -> Callable[[], list[MetricSink]]:
    """Return what makes new sinks for a strategy, those left out whose files another of them writes too.

    Raises :class:`UsageError` for one whose package is missing or that refuses its value.
    """
    wanted: dict[type[Any], Any] = {sink: options[flag_name(sink)] for sink in SinkRegistry if sink.flag}
    wanted = {sink: value for sink, value in wanted.items() if value not in (None, False)}
    included = {name for sink in wanted for name in sink.includes}
    for sink in wanted:
        sink.check_installed()

    def make() -> list[MetricSink]:
        chosen = {sink: value for sink, value in wanted.items() if sink.name not in included}
        return [sink(**{sink.option: value}) if sink.option else sink() for sink, value in chosen.items()]

    make()
    return make
