"""``loopscope replay RUN --to SINK``: sends the record of a run that is over to another destination."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import UsageError, unknown
from ..hooks import SinkRegistry
from ..runs import ReplaySink, run_folders
from .parser import CommandParser


def replay(words: Sequence[str], show: Callable[[str], None]) -> None:
    """Run the command; raises :class:`UsageError` before anything is sent if any of it cannot be."""
    sinks = {sink.name: sink for sink in SinkRegistry if issubclass(sink, ReplaySink)}
    given = _parser(sinks).parse(words)
    runs, target = given.pop("RUN"), given.pop("to", None)
    if len(runs) != 1:
        number = f"{len(runs)}: {', '.join(runs)}" if runs else "none"
        raise UsageError(f"loopscope replay takes one folder, RUN, but got {number}.")
    if target is None:
        raise UsageError(f"loopscope replay needs --to, which is one of {', '.join(sinks)}.")
    if target not in sinks:
        raise unknown("value of --to:", target, sinks)
    for option in given:
        if option != sinks[target].option:
            raise UsageError(f"--{option} is no option of --to {target}.")
    sinks[target].check_installed()
    for send in [sinks[target].replay(folder, **given) for folder in run_folders(Path(runs[0]), "replay")]:
        show(send() + "\n")


def _parser(sinks: Mapping[str, type[ReplaySink]]) -> CommandParser:
    options = {sink.option: sink.name for sink in sinks.values() if sink.option}
    usage = " ".join(["replay RUN --to", "|".join(sinks), *(f"[--{name} {name.upper()}]" for name in options)])
    about = "Send the JSONL record of a run that is over, as the sink would have during the run."
    parser = CommandParser(usage, about)
    run = "the folder of a run, OUTPUT_DIR/EXPERIMENT/STRATEGY, or of an experiment: then all its strategies"
    parser.add_argument("RUN", nargs="*", help=run)
    parser.add("to", str, f"where to: {' or '.join(sinks)}", metavar="SINK")
    for name, sink in options.items():
        parser.add(name, str, f"the {name} of {sink}; by default the experiment's name", metavar=name.upper())
    return parser
