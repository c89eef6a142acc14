"""The options of ``loopscope run EXPERIMENT``: from its config class, the run's flags, the sinks and YAML files."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentError, Namespace

from ..errors import unknown
from ..hooks import MetricSink, SinkRegistry
from ..runs import ExperimentRunner, RunFlags
from .config_file import read_config
from .errors import refusal
from .help import HelpfulParser

Experiment = type[ExperimentRunner[Any]]
NEGATIVE_NUMBER = re.compile(r"-(\d|\.\d|inf|nan)")


@dataclass(frozen=True, kw_only=True)
class CommandFlags(RunFlags):
    """Options of the run.

    Args:
        device: where to train; by default the accelerator if there is one.
        live: show progress, results and the newest metrics on the whole screen.
        silent: show one progress bar, and at the end what was warned of.
        no_console_output: show nothing at all.
    """

    device: str | None = None
    live: bool = False
    silent: bool = False
    no_console_output: bool = False


class Collect(argparse.Action):
    """Adds up the values of a repeated flag; together they replace what a config file says."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, **settings)
        self._collected: list[str] = []

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Take the values of one occurrence."""
        self._collected += values
        setattr(namespace, self.dest, list(self._collected))


def parse_run(experiment: Experiment, words: Sequence[str]) -> tuple[HelpfulParser, Namespace]:
    """Parse the words after the experiment's name; raises :class:`UsageError` with one sentence.

    Flags win over config files wherever they stand, later files over earlier ones, and files over the preset.
    """
    words = spelled(words)
    types = option_types(experiment)
    source = ""
    try:
        files, preset = _files_and_preset(words)
        content: dict[str, Any] = {}
        for file in files:
            content |= read_config(Path(file), types)
        preset = _known_preset(experiment, preset or content.get("preset"))
        parser = run_parser(experiment, preset)
        source = f" in the config file {' or '.join(files)}"
        options = parser.parse_object({**content, "preset": preset})
        source = ""
        return parser, parser.parse_args(words, namespace=options)
    except ArgumentError as error:
        raise refusal(str(error), types, source) from error


def parse_recorded(experiment: Experiment, options: Mapping[str, Any]) -> tuple[HelpfulParser, Namespace]:
    """Parse the options that a run has recorded; raises :class:`UsageError` where this version knows them no more."""
    try:
        parser = run_parser(experiment, _known_preset(experiment, options.get("preset")))
        return parser, parser.parse_object(dict(options))
    except ArgumentError as error:
        raise refusal(str(error), option_types(experiment), " in the recorded options") from error


def option_types(experiment: Experiment) -> dict[str, Any]:
    """Return the options that flags and config files may set, with their types."""
    lists = dict.fromkeys(("strategy", "hooks", "hook_config"), list[str])
    sinks = {flag_name(sink): str if sink.option else bool for sink in SinkRegistry if sink.flag}
    return {"preset": str, **lists, **sinks, **get_type_hints(CommandFlags), **get_type_hints(experiment.config_class)}


def run_parser(experiment: Experiment, preset: str | None) -> HelpfulParser:
    """Build the parser for an experiment, with the preset's values as defaults."""
    parser = HelpfulParser(
        usage=f"loopscope run {experiment.name} [options]", description=(experiment.__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file of options; flags win over it; may be repeated")
    add("--print_config", action="store_true", help="show the options as a config file, and exit")
    add("--preset", metavar="NAME", help=f"{' or '.join(experiment.presets) or 'none'}: a named set of options")
    names: dict[str, Any] = {"nargs": "+", "action": Collect, "default": [], "metavar": "NAME"}
    add("--strategy", **names, help=f"{', '.join(experiment.strategies)}, or all (the default)")
    add("--hooks", **names, help="hooks by name, as loopscope hooks lists them; also all, observers, with_debug")
    add("--hook_config", **names | {"action": "extend", "metavar": "H.O=V"}, help="options of hooks: hook.option=value")
    for sink in SinkRegistry:
        if sink.flag:
            first_line = (sink.__doc__ or "").partition("\n")[0]
            kind: dict[str, Any] = {"type": bool, "nargs": "?", "const": True, "default": False}
            if sink.option:
                kind = {"type": str | None, "default": None, "metavar": sink.option.upper()}
            add(f"--{flag_name(sink)}", **kind, help=first_line)
    parser.add_options(CommandFlags)
    parser.add_options(experiment.config_class)
    parser.let_do_without_value("save_checkpoints", 1 if experiment.loop == "epoch" else 100)
    if preset is not None:
        parser.set_defaults(dict(experiment.presets[preset]))
    return parser


def print_config(parser: HelpfulParser, options: Namespace) -> str:
    """Return the options as the text of a config file; those that are null are left out."""
    shown = options.clone()
    for command in ("config", "print_config"):
        shown.pop(command)
    return str(parser.dump(shown))


def flag_name(sink: type[MetricSink]) -> str:
    """Return the name of the option that asks for a sink."""
    return (sink.flag or "").strip("-").replace("-", "_")


def spelled(words: Sequence[str]) -> list[str]:
    """Spell options as the parser does, and tie negative numbers to theirs.

    >>> spelled(["--train-size", "9", "--lr", "-1e-3", "--strategy", "fixed-random"])
    ['--train_size', '9', '--lr=-1e-3', '--strategy', 'fixed-random']
    """
    result: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            result.append("--" + name[2:].replace("-", "_") + equals + value)
        elif NEGATIVE_NUMBER.match(word) and result and result[-1].startswith("--") and "=" not in result[-1]:
            result[-1] += f"={word}"
        else:
            result.append(word)
    return result


def _files_and_preset(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Find what must be known before the others are parsed."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", action="append", default=[])
    first.add_argument("--preset")
    known, _ = first.parse_known_args(words)
    return known.config, known.preset


def _known_preset(experiment: Experiment, preset: str | None) -> str | None:
    if preset is not None and preset not in experiment.presets:
        raise unknown(f"preset of {experiment.name}:", str(preset), experiment.presets)
    return preset
