"""The parser of ``loopscope run EXPERIMENT``: options of the experiment, the run and the sinks, in groups."""

import shutil
import textwrap
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import unknown
from ..hooks import MetricSink, SinkRegistry
from ..runs import ExperimentRunner, RunFlags, field_names
from .hook_pages import first_line
from .parser import NAMES, CommandParser, Option, field_options, heading_of

Experiment = type[ExperimentRunner[Any]]
METAVARS = {"with_hooks": "GROUP", "budget": "SHARE", "output_dir": "DIR", "on_options": "NAME=VALUE"}
METAVARS |= dict.fromkeys(("device", "guardian_device"), "DEVICE")
COMMON, RARE = "Experiment and hooks", "Rare options"  # headings in the help


@dataclass(frozen=True, kw_only=True)
class CommandFlags(RunFlags):
    """Options of the run.

    Args:
        device: the device to train on; by default the accelerator, if available.
        verbose: show the hooks, a table of all newest metrics at every SNAPSHOT, and the tables of hooks.
        live: show progress, results and the newest metrics on the full screen.
        silent: show one progress bar, and the warnings at the end.
        no_console_output: print nothing.
        jobs: the number of runs to train in parallel, each in a separate process; by default 1, with --on slurm all.
        on: train each run as a job of SLURM, or as a job on this machine that outlives the command (local).
        on_options: options of the jobs, such as partition=gpu gpus=1 cpus=4 mem=16G time=2:00:00, or a YAML file.
        traceback: show the full traceback of an error before its one-line message.
    """

    device: str | None = None
    verbose: bool = False
    live: bool = False
    silent: bool = False
    no_console_output: bool = False
    jobs: int | None = None
    on: Literal["slurm", "local"] | None = None
    on_options: list[str] = field(default_factory=list)
    traceback: bool = False


def run_parser(experiment: Experiment, preset: str | None) -> CommandParser:
    """Build the parser for an experiment, with the preset's values as defaults."""
    if preset is not None and str(preset) not in experiment.presets:  # a file may contain any value here
        raise unknown(f"preset of {experiment.name}:", str(preset), experiment.presets)
    parser = CommandParser(f"run {experiment.name} [options]", first_line(experiment))
    groups = _help_groups(experiment)
    width = shutil.get_terminal_size().columns - 3
    wrapped = {heading: textwrap.fill(heading, width, subsequent_indent="  ") for heading in groups}
    sections = {heading: parser.add_argument_group(lines) for heading, lines in wrapped.items()}
    config = "YAML file of options; flags override it; may be repeated"
    sections[COMMON].add_argument("--config", metavar="FILE", action="append", help=config)
    print_config = "print the options as a config file, and exit"
    sections[RARE].add_argument("--print-config", action="store_true", help=print_config)
    values = experiment.presets[preset] if preset is not None else {}
    options = [*_common_options(experiment), *map(_sink_option, flag_sinks())]
    for source in (CommandFlags, experiment.config_class):
        options += field_options(source, values, _settings(experiment))
    all_names = {option.name for option in options}
    for heading, names in groups.items():
        group = sections[heading]
        for option in [option for name in names for option in options if option.name == name]:
            parser.add(
                option.name, option.annotation, option.text, default=option.default, group=group, **option.settings
            )
            if option.annotation is bool and option.default is True and f"no_{option.name}" not in all_names:
                parser.add_negation(option.name, group)
    return parser


def _help_groups(experiment: Experiment) -> dict[str, list[str]]:
    """Return the names of all options by the heading under which the help shows them, common ones first."""
    sinks, checkpoints = [flag_name(sink) for sink in flag_sinks()], ["save_checkpoints", "checkpoint_every_steps"]
    groups = {
        COMMON: ["preset", "strategy", "seed", "hooks", "with_hooks", "hook_config", "budget", "reference"],
        "Output and display": ["output_dir", "overwrite", *sinks, "verbose", "live", "silent", "no_console_output"],
        "Checkpoints": [*checkpoints, "keep_checkpoints", "digest_every", "resume", "exact"],
        "Devices and processes": ["device", "jobs", "on", "on_options", "parallel"],
    }
    grouped = {name for names in groups.values() for name in names}
    for heading, options in ((heading_of(experiment.config_class), experiment.config_class), (RARE, CommandFlags)):
        groups[heading] = [name for name in field_names(options) if name not in grouped]
    return groups


def _common_options(experiment: Experiment) -> list[Option]:
    """Return the options that select what is trained and with which hooks."""
    presets = f"{' or '.join(experiment.presets) or 'none'}: a named set of options"
    strategies = f"{', '.join(experiment.strategies)}, or all (the default)"
    hooks = "names of hooks (loopscope hooks lists them), or all, observers, with_debug"
    assignments = "options of hooks: hook.option=value; --hook.option value is equivalent"
    return [
        Option("preset", str | None, presets, settings={"metavar": "NAME"}),
        Option("strategy", NAMES, strategies, [], {"metavar": "NAME"}),
        Option("hooks", NAMES, hooks, [], {"metavar": "NAME"}),
        Option("hook_config", NAMES, assignments, [], {"metavar": "H.O=V"}),
    ]


def _sink_option(sink: type[MetricSink]) -> Option:
    """Return the option that selects a sink."""
    name, text = flag_name(sink), first_line(sink).rstrip(".")
    if sink.option:
        return Option(name, str | None, text, settings={"metavar": sink.option.upper()})
    return Option(name, bool, text, sink.default)


def _settings(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Return further arguments of :meth:`CommandParser.add` for options of the run and the experiment."""
    return {
        **{name: {"metavar": metavar} for name, metavar in METAVARS.items()},
        "seed": {"nargs": "+"},
        "save_checkpoints": {"nargs": "?", "const": 1 if experiment.loop == "epoch" else 100},
    }


def flag_sinks() -> list[type[MetricSink]]:
    """Return the sinks that an option selects."""
    return [sink for sink in SinkRegistry if sink.flag]


def flag_name(sink: type[MetricSink]) -> str:
    """Return the name of the option that selects a sink."""
    return (sink.flag or "").strip("-").replace("-", "_")
