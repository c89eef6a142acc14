"""The command ``loopscope``: run, resume, diff, plot, replay, list, hooks."""

import sys
from collections.abc import Callable, Container, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from jsonargparse import Namespace

from ..checkpoints import StoppedError
from ..console import Label, Mode, RunConsole, print_experiments, print_hook, print_hooks, show_warnings
from ..errors import LoopscopeError, UsageError, counted, listed, unknown
from ..hooks import ExperimentRegistry, HookRegistry, SinkRegistry
from ..runs import (
    ExperimentConfig,
    ExperimentRunner,
    RunFlags,
    RunOptions,
    Session,
    check_device,
    field_names,
    require,
    versions,
)
from .diff import DIFF_USAGE, diff
from .help import HelpfulParser
from .hook_options import parse_hook_options
from .parser import Experiment, parse_recorded, parse_run, print_config
from .plot import PLOT_USAGE, plot
from .replay import replay, replay_usage
from .resume import recorded_run
from .sinks import wanted_sinks

USAGE = """usage: loopscope COMMAND ...

  loopscope run EXPERIMENT   train an experiment, with hooks; --help shows its options
  loopscope resume RUN       go on with a run that was interrupted
  loopscope diff RUN RUN     say at which step and in which tensor two runs part
  loopscope plot RUN...      draw metrics of runs against steps
  loopscope replay RUN       send the metrics of a finished run to W&B or TensorBoard
  loopscope list             the experiments, their strategies and presets
  loopscope hooks            all hooks, one line each
  loopscope hooks NAME       every metric and option of a hook
  loopscope --version        the version of loopscope, and those of Python and torch
"""
RUN_USAGE = """usage: loopscope run EXPERIMENT [options]

  loopscope run EXPERIMENT --help shows the options. Experiments: {experiments}
"""
RESUME_USAGE = """usage: loopscope resume RUN

  Goes on from the newest intact checkpoint of RUN with the options that it was started with: the same as the command
  that started it with --resume. RUN is the folder of one strategy, OUTPUT/EXPERIMENT/STRATEGY, or OUTPUT/EXPERIMENT
  for all that the command was given; those that are done stay as they are.
"""
HELP = ("-h", "--help")
Excepthook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def main(arguments: Sequence[str] | None = None, *, packages: Sequence[str] = ()) -> int:
    """Run the command and return its exit status: 0, 1 for a failed run, 2 for bad input, 128 + n after signal n.

    ``packages`` are imported first; they fill the registries.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    warned: list[str] = []

    def warn(label: Label, sentence: str) -> None:
        warned.append(sentence)
        _say(f"{label}: {sentence}")

    with show_warnings(warn):
        try:
            for package in packages:
                import_module(package)
            for registry in (ExperimentRegistry, HookRegistry, SinkRegistry):
                registry.discover()
            _dispatch(words)
        except StoppedError as error:
            _say(str(error))
            return error.status
        except LoopscopeError as error:
            return refused(error, unless=warned)
        except KeyboardInterrupt:
            _say("interrupted.")
            return 130
        except SystemExit as end:  # the parser's --help
            return int(end.code or 0)
    return 0


def refused(error: LoopscopeError, *, unless: Container[str] = ()) -> int:
    """Say in one line on standard error what is wrong, and return the exit status: 2 for bad input, 1 otherwise.

    What was said in the same words before, as a warning, is not said again.
    """
    sentence = " ".join(str(error).split())
    if sentence not in unless:
        _say(sentence)
    return 2 if isinstance(error, UsageError) else 1


def without_traceback(before: Excepthook) -> Excepthook:
    """Return an ``excepthook`` that refuses bad input, such as two hooks of one name in a script, in one line."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UsageError):
            raise SystemExit(refused(error))
        before(kind, error, trace)

    return excepthook


def _say(text: str) -> None:
    print(f"loopscope: {text}", file=sys.stderr)  # noqa: T201


def _dispatch(words: list[str]) -> None:
    commands: dict[str, Callable[[list[str]], None]] = {
        "run": _run,
        "resume": _resume,
        "diff": _diff,
        "plot": _plot,
        "replay": _replay,
        "list": _list,
        "hooks": _hooks,
    }
    if not words or words[0] == "help" or words[0] in HELP:
        _show(USAGE)
    elif words[0] == "--version":
        _show(", ".join(f"{name} {version}" for name, version in versions().items()) + "\n")
    elif words[0] in commands:
        commands[words[0]](words[1:])
    elif words[0].startswith("-"):
        raise UsageError(f"Unknown option {words[0]!r}; the options of a run come after loopscope run EXPERIMENT.")
    else:
        raise unknown("command", words[0], commands)


def _list(words: list[str]) -> None:
    if _asks_for_help(words, "list", most=0):
        _show(USAGE)
    else:
        print_experiments(list(ExperimentRegistry))


def _hooks(words: list[str]) -> None:
    if _asks_for_help(words, "hooks NAME", most=1):
        _show(USAGE)
    elif words:
        print_hook(HookRegistry.get(words[0].replace("-", "_")))
    else:
        print_hooks(list(HookRegistry))


def _plot(words: list[str]) -> None:
    if set(words) & set(HELP):
        _show(PLOT_USAGE)
    else:
        plot(words, _show)


def _diff(words: list[str]) -> None:
    if set(words) & set(HELP):
        _show(DIFF_USAGE)
    else:
        diff(words, _show)


def _replay(words: list[str]) -> None:
    if set(words) & set(HELP):
        _show(replay_usage())
    else:
        replay(words, _show)


def _asks_for_help(words: Sequence[str], command: str, *, most: int) -> bool:
    """Tell whether help is asked for; raises :class:`UsageError` for more words than ``most``."""
    if set(words) & set(HELP):
        return True
    if words[most:]:
        raise UsageError(f"loopscope {command} takes nothing more, but got {words[most]!r}.")
    return False


def _run(words: list[str]) -> None:
    if words and words[0] in HELP:
        _show(RUN_USAGE.format(experiments=", ".join(ExperimentRegistry.names())))
        return
    if not words or words[0].startswith("-"):
        known = ", ".join(ExperimentRegistry.names())
        raise UsageError(
            f"loopscope run needs the name of an experiment first: loopscope run EXPERIMENT. Known: {known}."
        )
    experiment = ExperimentRegistry.get(words[0].replace("-", "_"))
    parser, options = parse_run(experiment, words[1:])
    if options["print_config"]:
        experiment.config_class(**_chosen(options, experiment.config_class))
        _show(print_config(parser, options))
    else:
        _start(experiment, parser, options)


def _start(experiment: Experiment, parser: HelpfulParser, options: Namespace) -> None:
    config = experiment.config_class(**_chosen(options, experiment.config_class))
    recorded = yaml.safe_load(print_config(parser, options))
    _train(experiment(config, check_device(options["device"])), options, recorded)


def _resume(words: list[str]) -> None:
    if set(words) & set(HELP):
        _show(RESUME_USAGE)
        return
    require(
        len(words) == 1, "loopscope resume takes the folder of one run: loopscope resume OUTPUT/EXPERIMENT/STRATEGY."
    )
    recorded = recorded_run(Path(words[0]))
    experiment = ExperimentRegistry.get(recorded.experiment)
    parser, options = parse_recorded(experiment, recorded.options)
    _start(experiment, parser, options)


def _train(runner: ExperimentRunner[Any], options: Namespace, recorded: Mapping[str, Any]) -> None:
    run_options = RunOptions(
        **_chosen(options, RunFlags),
        strategies=options["strategy"],
        hooks=[name.replace("-", "_") for name in options["hooks"]],
        hook_options=parse_hook_options(options["hook_config"]),
        recorded=recorded,
    )
    make_sinks = wanted_sinks(vars(options))
    display = RunConsole(
        _mode(options),
        live_metrics=runner.live_metrics,
        progress_metrics=runner.progress_metrics,
        compared_to=runner.compared_to,
    )
    if run_options.validate_checkpoints:
        for strategy, steps in Session(runner, run_options).validate().items():
            _show(f"{strategy}: the same bit for bit at {counted(len(steps), 'checkpoint')}, steps {listed(steps)}\n")
        return
    with display as console:
        Session(runner, run_options, lambda: [*console.sinks(), *make_sinks()], console).run()


def _chosen(options: Namespace, group: type[ExperimentConfig | RunFlags]) -> dict[str, Any]:
    return {name: options[name] for name in field_names(group)}


def _mode(options: Namespace) -> Mode:
    """Return the display that the flags ask for; raises :class:`UsageError` for more than one of them."""
    modes: dict[str, Mode] = {"live": "live", "silent": "silent", "no_console_output": "none"}
    asked = [flag for flag in modes if options[flag]]
    require(
        len(asked) <= 1,
        f"{' and '.join('--' + flag.replace('_', '-') for flag in asked)} exclude each other: a run has one display; "
        "choose one of --live, --silent and --no-console-output, or none of them.",
    )
    return modes[asked[0]] if asked else "normal"


def _show(text: str) -> None:
    print(text, end="")  # noqa: T201
