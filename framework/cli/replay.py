"""``loopscope replay RUN --to SINK``: sends the record of a run that is over to another destination."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import UsageError, unknown
from ..hooks import SinkRegistry
from ..runs import ReplaySink, run_folders
from .words import parted

REPLAY_USAGE = """usage: loopscope replay RUN --to {sinks} {options}

  sends the JSONL record of a run that is over, as the sink would have during the run

  RUN          the folder of a run, OUTPUT_DIR/EXPERIMENT/STRATEGY, or of an experiment: then all its strategies
  --to SINK    where to: {sinks}
{lines}"""


def replay_usage() -> str:
    """Return the help of the command."""
    sinks = _targets().values()
    options = {sink.option: sink.name for sink in sinks if sink.option}
    return REPLAY_USAGE.format(
        sinks="|".join(sink.name for sink in sinks),
        options=" ".join(f"[--{option} {option.upper()}]" for option in options),
        lines="".join(
            f"  --{option} {option.upper()}   the {option} of {name}; by default the experiment's name\n"
            for option, name in options.items()
        ),
    )


def replay(words: Sequence[str], show: Callable[[str], None]) -> None:
    """Run the command; raises :class:`UsageError` before anything is sent if any of it cannot be."""
    sinks = _targets()
    known = {"to", *(sink.option for sink in sinks.values() if sink.option)}
    given = parted(words, values=known)
    runs, options = given.plain, given.values
    if len(runs) != 1:
        number = f"{len(runs)}: {', '.join(runs)}" if runs else "none"
        raise UsageError(f"loopscope replay takes one folder, RUN, but got {number}.")
    target = options.pop("to", None)
    if target is None:
        raise UsageError(f"loopscope replay needs --to, which is one of {', '.join(sinks)}.")
    if target not in sinks:
        raise unknown("value of --to:", target, sinks)
    for option in options:
        if option != sinks[target].option:
            raise UsageError(f"--{option} is no option of --to {target}.")
    sinks[target].check_installed()
    for send in [sinks[target].replay(folder, **options) for folder in run_folders(Path(runs[0]))]:
        show(send() + "\n")


def _targets() -> dict[str, type[ReplaySink]]:
    return {sink.name: sink for sink in SinkRegistry if issubclass(sink, ReplaySink)}
