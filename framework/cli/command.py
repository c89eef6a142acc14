"""Dispatch of the command line, and the commands that are too small for a separate file."""

import sys
from collections.abc import Container, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import yaml

from ..checkpoints import StoppedError
from ..console import Label, Mode, experiment_list, make_console, printable, show_warnings, watch
from ..doctor import DetectorRegistry
from ..errors import LoopscopeError, UsageError, unknown
from ..hooks import ExperimentRegistry, HookRegistry, SinkRegistry
from ..interruption import raise_at_ctrl_c
from ..names import as_names
from ..option_words import command_line_messages
from ..runs import ReplaySink, Session, check_device, require, run_folders, warn_of_changes
from ..training import Parallel, is_main_process, is_restarted, torchrun_world_size
from .agents import agents, agents_parser
from .alerts import alerts, alerts_parser
from .compare import compare, compare_parser
from .completion import SHELLS, completion_script
from .diff import diff, diff_parser
from .doctor import doctor, doctor_parser
from .hook_pages import hooks, hooks_parser
from .jobs import ONE_OF_SEVERAL, train_in_parallel, train_one_of_several
from .listing import ls, ls_parser, show, show_parser
from .lost_rows import require_all_rows
from .new import new, new_parser
from .options import Options, config_of, parse_recorded, parse_run, plain, run_options, wanted_sinks
from .output import ReportedError, write_error
from .parser import CommandParser, dashed, write_line
from .plot import plot, plot_parser
from .report import report, report_parser
from .rewind import rewind, rewind_parser
from .run_parser import Experiment
from .user_errors import user_errors
from .verify import verify, verify_parser

# The display of a run, by the flag that selects it.
MODES: dict[str, Mode] = {"verbose": "verbose", "live": "live", "silent": "silent", "no_console_output": "none"}


def run_command(words: Sequence[str], packages: str | Sequence[str]) -> int:
    """Import the packages, run a command and return its exit status; see :func:`loopscope.cli.main.main`."""
    warned: list[str] = []

    def warn(label: Label, sentence: str) -> None:
        warned.append(sentence)
        _print_warning(label, sentence)

    with command_line_messages(), show_warnings(warn):
        try:
            for package in as_names(packages):
                import_module(package)
            for registry in (ExperimentRegistry, HookRegistry, SinkRegistry, DetectorRegistry):
                registry.discover()
            raise_at_ctrl_c()
            _dispatch(*words)
        except StoppedError as error:
            _print_message(str(error))
            return error.status
        except LoopscopeError as error:
            if "--json" in words and not isinstance(error, ReportedError) and is_main_process():
                write_error(error)
            return refused(error, unless=warned)
        except KeyboardInterrupt:
            _print_message("interrupted.")
            return 130
        except SystemExit as end:  # a parser's --help
            return int(end.code or 0)
    return 0


def refused(error: LoopscopeError, *, unless: Container[str] = ()) -> int:
    """Print the error as one line on standard error, and return the exit status: 2 for bad input, otherwise 1."""
    sentence = " ".join(str(error).split())
    if sentence not in unless:  # a warning has already printed it
        _print_message(sentence)
    return 2 if isinstance(error, UsageError) else 1


def _dispatch(command: str, *words: str) -> None:
    if command == ONE_OF_SEVERAL:
        with show_warnings(_print_warning, alerts=False), user_errors(full_traceback="--traceback" in sys.argv):
            train_one_of_several()
        return
    local_commands = dict(run=_run, resume=_resume, replay=_replay, list=_list, completion=_completion)
    functions = (agents, alerts, hooks, ls, show, doctor, diff, new, plot, compare, report, rewind, verify)
    commands = local_commands | {function.__name__: function for function in functions}
    if command.startswith("-"):
        raise UsageError(f"Unknown option {command!r}; put the options of a run after loopscope run EXPERIMENT.")
    if command not in commands:
        raise unknown("command", command, commands)
    commands[command](words)


def _list(words: Sequence[str]) -> None:
    list_parser().parse(words)
    make_console().print(experiment_list(ExperimentRegistry))


def _completion(words: Sequence[str]) -> None:
    """Print the script of a shell that completes commands, experiments and options."""
    parser = CommandParser(
        "completion SHELL",
        "Print a script with which a shell completes commands, experiments, options and their values. It contains the "
        "experiments and hooks of this installation, so repeat the command after installing others.",
    )
    parser.add_argument("SHELL", nargs="*", help=" or ".join(SHELLS))
    shells = parser.parse(words)["SHELL"]
    require(len(shells) == 1, f"loopscope completion takes one shell: {', '.join(SHELLS)}.")
    if shells[0] not in SHELLS:
        raise unknown("shell", shells[0], SHELLS)
    parsers = [
        *(list_parser(), hooks_parser(), resume_parser(), _replay_parser(_replay_sinks()), parser),
        *(ls_parser(), show_parser(), diff_parser(), new_parser(), plot_parser(), compare_parser(), report_parser()),
        *(doctor_parser(), alerts_parser(), rewind_parser(), verify_parser(), agents_parser()),
    ]
    sys.stdout.write(completion_script(shells[0], parsers))


def list_parser() -> CommandParser:
    """Build the parser of ``loopscope list``."""
    return CommandParser("list", "Show the experiments, their strategies and presets.")


def _run(words: Sequence[str]) -> None:
    names = ", ".join(ExperimentRegistry.names())
    if words and words[0] in ("-h", "--help"):
        about = f"loopscope run EXPERIMENT --help shows the options. Experiments: {names}"
        CommandParser("run EXPERIMENT [options]", about, add_help=False).print_help()
        return
    problem = f"loopscope run needs an experiment as its first argument: loopscope run EXPERIMENT. Choices: {names}."
    require(bool(words) and not words[0].startswith("-"), problem)
    experiment = ExperimentRegistry.get(words[0].replace("-", "_"))
    options = parse_run(experiment, words[1:])
    if options.pop("print_config"):
        config_of(experiment, options)
        yaml.safe_dump(plain(options), sys.stdout, sort_keys=False)
    else:
        _start(experiment, options)


def resume_parser() -> CommandParser:
    """Build the parser of ``loopscope resume``."""
    parser = CommandParser(
        "resume RUN",
        "Resume RUN from its newest intact checkpoint, with its original options. This is the same as the original "
        "command with --resume.",
    )
    parser.add_argument(
        "RUN",
        nargs="*",
        help="the folder of one strategy, OUTPUT/EXPERIMENT/STRATEGY, or OUTPUT/EXPERIMENT for all strategies of the "
        "original command; completed strategies are skipped",
    )
    parser.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    for flag in MODES:
        parser.add(flag, bool, "select this display instead of the one in the original command", default=False)
    parser.add("parallel", Parallel, "how the processes share the run from now on (default: unchanged)")
    parser.add("exact", bool, "refuse to resume unless the run stays the same bit for bit", default=False)
    return parser


def _resume(words: Sequence[str]) -> None:
    given = resume_parser().parse(words)
    shared = {name: given.pop(name) for name in ("parallel", "exact") if name in given}
    runs, traceback = given.pop("RUN"), given.pop("traceback")
    problem = "loopscope resume takes the folder of one run: loopscope resume OUTPUT/EXPERIMENT/STRATEGY."
    require(len(runs) == 1, problem)
    experiment, options = parse_recorded(Path(runs[0]))
    if given:  # the display does not affect the run
        options |= dict.fromkeys(MODES, False) | given
    if not torchrun_world_size():  # a run of several processes resumes in one
        options["parallel"] = None
    _start(experiment, options | shared | {"traceback": traceback})


def _start(experiment: Experiment, options: Options) -> None:
    """Train an experiment."""
    if is_restarted():
        options = options | {"resume": True, "overwrite": False}
    with user_errors(full_traceback=options["traceback"]):
        runner = experiment(config_of(experiment, options), check_device(options["device"]))
        session, mode = Session(runner, run_options(options), wanted_sinks(options)), _mode(options)
        several = (options["jobs"] or 1) > 1
        conflict = "--jobs trains several runs, --parallel trains one run in several processes; remove one of them."
        require(not several or session.options.parallel is None, conflict)
        plan = session.planned() if several else []
        if len(plan) > 1:
            train_in_parallel(plan, options, mode, runner.compared_to)
        else:
            require_all_rows(watch(session, mode) if is_main_process() else session.run())


def _mode(options: Options) -> Mode:
    """Return the display that the flags select; raises :class:`UsageError` for more than one flag."""
    selected = [flag for flag in MODES if options[flag]]
    remedy = "use at most one of --verbose, --live, --silent and --no-console-output."
    require(len(selected) <= 1, f"{' and '.join(map(dashed, selected))} exclude each other: {remedy}")
    return MODES[selected[0]] if selected else "normal"


def _replay(words: Sequence[str]) -> None:
    """Send the records of runs; raises :class:`UsageError` before anything is sent if one record cannot be sent."""
    sinks = _replay_sinks()
    given = _replay_parser(sinks).parse(words)
    runs, target = given.pop("RUN"), given.pop("to", None)
    number = f"{len(runs)}: {', '.join(runs)}" if runs else "none"
    require(len(runs) == 1, f"loopscope replay takes one folder, RUN, but got {number}.")
    require(target is not None, f"loopscope replay needs --to SINK; choose one of {', '.join(sinks)}.")
    if target not in sinks:
        raise unknown("value of --to:", target, sinks)
    for option in given:
        require(option == sinks[target].option, f"--{option} does not apply to --to {target}.")
    sinks[target].check_installed()
    folders = run_folders(Path(runs[0]), "replay")
    sends = [sinks[target].replay(folder, **given) for folder in folders]
    for folder in folders:
        warn_of_changes(folder)
    for send in sends:
        write_line(send())


def _replay_sinks() -> dict[str, type[ReplaySink]]:
    """Return the sinks to which a record can be sent, by name."""
    return {sink.name: sink for sink in SinkRegistry if issubclass(sink, ReplaySink)}


def _replay_parser(sinks: Mapping[str, type[ReplaySink]]) -> CommandParser:
    options: dict[str, list[str]] = {}
    for sink in sinks.values():
        if sink.option:
            options.setdefault(sink.option, []).append(sink.name)
    usage = " ".join(["replay RUN --to SINK", *(f"[--{name} NAME]" for name in options)])
    about = "Send the JSONL record of a finished run to a sink, as if the sink had been active during the run."
    parser = CommandParser(usage, about)
    run = "the folder of a run, OUTPUT_DIR/EXPERIMENT/STRATEGY, or of an experiment for all its strategies"
    parser.add_argument("RUN", nargs="*", help=run)
    parser.add("to", str, f"the destination: {' or '.join(sinks)}", metavar="SINK")
    for name, owners in options.items():
        text = f"the {name} of {' or '.join(owners)} (default: the experiment's name)"
        parser.add(name, str, text, metavar="NAME")
    return parser


def _print_warning(label: Label, sentence: str) -> None:
    _print_message(f"{label}: {sentence}")


def _print_message(text: str) -> None:
    if is_main_process():
        print(f"loopscope: {printable(text)}", file=sys.stderr)  # noqa: T201
