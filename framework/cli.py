"""The command ``loopscope``: run, list, hooks."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from framework.cli_errors import sentence
from framework.cli_hook_options import parse_hook_options
from framework.config import RunOptions, field_names
from framework.console import RunConsole, print_experiments, print_hook, print_hooks
from framework.errors import LoopscopeError, UsageError, unknown
from framework.registry import ExperimentRegistry, HookRegistry, SinkRegistry
from framework.session import Session, check_device

USAGE = """usage: loopscope COMMAND ...

  loopscope run EXPERIMENT   train an experiment, with hooks; --help shows its options
  loopscope list             the experiments, their strategies and presets
  loopscope hooks [NAME]     all hooks, or every metric and option of one
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for a failed run, 2 for bad input, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except UsageError as error:
        print(f"loopscope: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except LoopscopeError as error:
        print(f"loopscope: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print("loopscope: interrupted.", file=sys.stderr)  # noqa: T201
        return 130


def _dispatch(words: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], None]] = {"run": _run, "list": _list, "hooks": _hooks}
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")  # noqa: T201
        return 0
    if words[0] not in commands:
        raise unknown("command", words[0], commands)
    commands[words[0]](words[1:])
    return 0


def _list(words: list[str]) -> None:
    _no_more(words, "list")
    print_experiments(list(ExperimentRegistry))


def _hooks(words: list[str]) -> None:
    _no_more(words[1:], "hooks NAME")
    if words:
        print_hook(HookRegistry.get(words[0]))
    else:
        print_hooks(list(HookRegistry))


def _no_more(words: Sequence[str], command: str) -> None:
    if words:
        raise UsageError(f"loopscope {command} takes no further argument, but got {words[0]!r}.")


class _Parser(ArgumentParser):
    """An argument parser that spells options with dashes in its help."""

    def format_help(self) -> str:
        return re.sub(r"--[a-z][a-z_]*", lambda match: match[0].replace("_", "-"), super().format_help())


def run_parser(experiment: type[Any], preset: str | None) -> ArgumentParser:
    """Build the parser of ``loopscope run EXPERIMENT``: the options of the run, then those of the experiment's config."""
    parser = _Parser(
        prog=f"loopscope run {experiment.name}", exit_on_error=False, description=experiment.__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--config", action="config", metavar="FILE", help="YAML file of options; flags after it win over it")
    add("--preset", choices=sorted(experiment.presets), help="named set of experiment options")
    add("--strategy", nargs="+", default=[], metavar="S", help=f"{', '.join(experiment.strategies)}, or all")
    add("--with_hooks", metavar="GROUP", help="hook group: none, minimal, observers, interventions, full")
    add("--hooks", nargs="+", default=[], metavar="NAME", help="hooks by name; also all, observers, with_debug")
    add("--hook_config", nargs="+", default=[], metavar="H.O=V", help="options of hooks, as hook.option=value")
    for sink in SinkRegistry:
        if sink.flag:
            add(
                sink.flag.replace("-", "_").replace("__", "--", 1),
                action="store_true",
                help=sink.__doc__.splitlines()[0],
            )
    add("--on_hook_error", choices=["raise", "skip"], default="raise", help="end the run, or go on without the hook")
    add("--audit_hooks", action="store_true", help="digest the whole training state around every hook call")
    add("--profile_hooks", action="store_true", help="write each hook's time to summary.json")
    add("--guardian_device", metavar="DEVICE", help="where rollback copies live, if not beside the originals")
    add("--device", help="where to train (default: the accelerator if there is one)")
    add("--overwrite", action="store_true", help="write over a run that lies in the output directory")
    add("--silent", action="store_true", help="one progress bar and nothing else")
    add("--no_console_output", action="store_true", help="no output at all")
    parser.add_class_arguments(experiment.config_class, as_group=True)
    if preset is not None:
        parser.set_defaults(dict(experiment.presets[preset]))
    return parser


def _run(words: list[str]) -> None:
    if not words or words[0].startswith("-"):
        print(f"usage: loopscope run EXPERIMENT [options]\n\nexperiments: {', '.join(ExperimentRegistry.names())}")  # noqa: T201
        if words and words[0] in ("-h", "--help"):
            return
        raise UsageError("loopscope run needs the name of an experiment first.")
    experiment = ExperimentRegistry.get(words[0])
    options = parse_run(experiment, [_underscored(word) for word in words[1:]])
    config_names = field_names(experiment.config_class)
    config = experiment.config_class(**{name: options[name] for name in config_names})
    device = check_device(options["device"])
    run_options = RunOptions(
        strategies=options["strategy"],
        with_hooks=options["with_hooks"],
        hooks=options["hooks"],
        hook_options=parse_hook_options(options["hook_config"]),
        on_hook_error=options["on_hook_error"],
        audit_hooks=options["audit_hooks"],
        profile_hooks=options["profile_hooks"],
        guardian_device=options["guardian_device"],
        overwrite=options["overwrite"],
    )
    mode = "none" if options["no_console_output"] else "silent" if options["silent"] else "normal"
    console = RunConsole(mode)
    wanted = [sink for sink in SinkRegistry if sink.flag and options[sink.flag.strip("-").replace("-", "_")]]
    with console:
        Session(
            experiment(config, device),
            run_options,
            make_sinks=lambda: [*console.sinks(), *(sink() for sink in wanted)],
            display=console,
        ).run()


def parse_run(experiment: type[Any], words: list[str]) -> Namespace:
    """Parse the words after the experiment's name; raises :class:`UsageError` with one sentence."""
    preset = _preset(experiment, words)
    parser = run_parser(experiment, preset)
    try:
        return parser.parse_args(words)
    except ArgumentError as error:
        raise UsageError(sentence(str(error), parser)) from error


def _preset(experiment: type[Any], words: list[str]) -> str | None:
    """Find the preset before parsing, since it sets the defaults of everything else."""
    first = ArgumentParser(exit_on_error=False, add_help=False)
    first.add_argument("--preset")
    found: list[str] = [words[index + 1] for index, word in enumerate(words[:-1]) if word == "--preset"]
    found += [word.split("=", 1)[1] for word in words if word.startswith("--preset=")]
    files = [words[index + 1] for index, word in enumerate(words[:-1]) if word == "--config"]
    files += [word.split("=", 1)[1] for word in words if word.startswith("--config=")]
    for file in files if not found else []:
        match = re.search(r"^preset:\s*(\w+)", Path(file).read_text("utf-8"), re.M) if Path(file).is_file() else None
        found += [match[1]] if match else []
    if not found:
        return None
    if found[-1] not in experiment.presets:
        raise unknown(f"preset of {experiment.name!r}", found[-1], experiment.presets)
    return found[-1]


def _underscored(word: str) -> str:
    """Spell an option as the parser does, so that dashes and underscores are both accepted."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value
