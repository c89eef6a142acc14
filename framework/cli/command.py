"""What follows ``loopscope``, carried out: the commands that have no file of their own."""

import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import format_exception

import yaml

from ..checkpoints import StoppedError
from ..console import Label, Mode, experiment_list, hook_list, hook_page, make_console, printable, show_warnings, watch
from ..errors import LoopscopeError, UsageError, counted, listed, passed_through_users_code, unknown, with_lines
from ..hooks import ExperimentRegistry, HookRegistry, SinkRegistry
from ..runs import ReplaySink, Session, check_device, require, run_folders
from ..training import Parallel, is_restarted, speaks, started_together
from .compare import compare
from .diff import diff
from .jobs import ONE_OF_SEVERAL, train_one_of_several, train_side_by_side
from .listing import ls, show
from .new import new
from .options import Experiment, Options, config_of, parse_recorded, parse_run, plain, run_options, wanted_sinks
from .parser import CommandParser, dashed, write_line
from .plot import plot
from .report import report
from .rewind import rewind

# The displays of a run by the flags that ask for them.
MODES: dict[str, Mode] = {"live": "live", "silent": "silent", "no_console_output": "none"}


def run_command(words: Sequence[str], packages: Sequence[str]) -> int:
    """Import the packages, run a command and return its exit status; see :func:`loopscope.cli.main.main`."""
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
            _dispatch(*words)
        except StoppedError as error:
            _say(str(error))
            return error.status
        except LoopscopeError as error:
            return refused(error, unless=warned)
        except KeyboardInterrupt:
            _say("interrupted.")
            return 130
        except SystemExit as end:  # a parser's --help
            return int(end.code or 0)
    return 0


def refused(error: LoopscopeError, *, unless: Container[str] = ()) -> int:
    """Say in one line on standard error what is wrong, and return the exit status: 2 for bad input, 1 otherwise."""
    sentence = " ".join(str(error).split())
    if sentence not in unless:  # or it was said before, as a warning
        _say(sentence)
    return 2 if isinstance(error, UsageError) else 1


def _dispatch(command: str, *words: str) -> None:
    if command == ONE_OF_SEVERAL:
        tell = show_warnings(lambda label, sentence: _say(f"{label}: {sentence}"), alerts=False)
        with tell, _own_lines(whole="--traceback" in sys.argv):
            train_one_of_several()
        return
    own = dict(run=_run, resume=_resume, replay=_replay, list=_list, hooks=_hooks)
    commands = own | {each.__name__: each for each in (ls, show, diff, new, plot, compare, report, rewind)}
    if command.startswith("-"):
        raise UsageError(f"Unknown option {command!r}; the options of a run come after loopscope run EXPERIMENT.")
    if command not in commands:
        raise unknown("command", command, commands)
    commands[command](words)


def _list(words: Sequence[str]) -> None:
    CommandParser("list", "Show the experiments, their strategies and presets.").parse(words)
    make_console().print(experiment_list(ExperimentRegistry))


def _hooks(words: Sequence[str]) -> None:
    parser = CommandParser("hooks [NAME]", "Show all hooks, one line each, or every metric and option of one of them.")
    parser.add_argument("NAME", nargs="?", help="the name of a hook")
    name = parser.parse(words)["NAME"]
    page = hook_list(list(HookRegistry)) if name is None else hook_page(HookRegistry.get(name.replace("-", "_")))
    make_console().print(page)


def _run(words: Sequence[str]) -> None:
    known = ", ".join(ExperimentRegistry.names())
    if words and words[0] in ("-h", "--help"):
        about = f"loopscope run EXPERIMENT --help shows the options. Experiments: {known}"
        CommandParser("run EXPERIMENT [options]", about, add_help=False).print_help()
        return
    needed = f"loopscope run needs the name of an experiment first: loopscope run EXPERIMENT. Known: {known}."
    require(bool(words) and not words[0].startswith("-"), needed)
    experiment = ExperimentRegistry.get(words[0].replace("-", "_"))
    options = parse_run(experiment, words[1:])
    if options.pop("print_config"):
        config_of(experiment, options)
        yaml.safe_dump(plain(options), sys.stdout, sort_keys=False)
    else:
        _start(experiment, options)


def _resume(words: Sequence[str]) -> None:
    parser = CommandParser(
        "resume RUN",
        "Go on from the newest intact checkpoint of RUN with the options that it was started with: the same as the "
        "command that started it with --resume.",
    )
    parser.add_argument(
        "RUN",
        nargs="*",
        help="the folder of one strategy, OUTPUT/EXPERIMENT/STRATEGY, or OUTPUT/EXPERIMENT for all that the command "
        "was given; those that are done stay as they are",
    )
    parser.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
    for flag in MODES:
        parser.add(flag, bool, "the display, in place of that of the command that started the run", default=False)
    parser.add("parallel", Parallel, "how the processes share the run from now on; by default as before")
    parser.add("exact", bool, "refuse to go on where the run would not be the same bit for bit", default=False)
    given = parser.parse(words)
    shared = {name: given.pop(name) for name in ("parallel", "exact") if name in given}
    runs, traceback = given.pop("RUN"), given.pop("traceback")
    needed = "loopscope resume takes the folder of one run: loopscope resume OUTPUT/EXPERIMENT/STRATEGY."
    require(len(runs) == 1, needed)
    experiment, options = parse_recorded(Path(runs[0]))
    if given:  # the display is no part of the run
        options |= dict.fromkeys(MODES, False) | given
    if not started_together():  # a run of several processes goes on in one
        options["parallel"] = None
    _start(experiment, options | shared | {"traceback": traceback})


@contextmanager
def _own_lines(*, whole: bool) -> Iterator[None]:
    """Tell what the user's own code raises in a sentence with its lines, after the ``whole`` traceback if asked for.

    An error that passed through no code of the user's is raised as it is: it may be a fault of loopscope.
    """
    try:
        yield
    except Exception as error:
        known = isinstance(error, LoopscopeError)
        if not known and not passed_through_users_code(error):
            raise
        if whole and not isinstance(error, StoppedError):
            sys.stderr.write("\n".join(map(printable, "".join(format_exception(error)).split("\n"))))
        if known:
            raise
        hint = "" if whole else " --traceback shows the whole traceback."
        raise LoopscopeError(f"Code of the experiment raised {with_lines(error)}.{hint}") from error


def _start(experiment: Experiment, options: Options) -> None:
    """Train an experiment, or compare it with its checkpoints."""
    if is_restarted() and not options["validate_checkpoints"]:
        options = options | {"resume": True, "overwrite": False}
    with _own_lines(whole=options["traceback"]):
        runner = experiment(config_of(experiment, options), check_device(options["device"]))
        session, mode = Session(runner, run_options(options), wanted_sinks(options)), _mode(options)
        if session.options.validate_checkpoints:
            compared = session.validate()
            for name, steps in compared.items() if speaks() else ():
                where = f"{counted(len(steps), 'moment')}, steps {listed(steps)}"
                write_line(f"{name}: the same bit for bit at {where}")
            return
        several = (options["jobs"] or 1) > 1
        both = "--jobs trains several runs, --parallel one run in several processes; leave one of them out."
        require(not several or session.options.parallel is None, both)
        plan = session.planned() if several else []
        if len(plan) > 1:
            train_side_by_side(plan, options, mode, runner.compared_to)
        elif speaks():
            watch(session, mode)
        else:
            session.run()


def _mode(options: Options) -> Mode:
    """Return the display that the flags ask for; raises :class:`UsageError` for more than one of them."""
    asked = [flag for flag in MODES if options[flag]]
    one = "a run has one display; choose one of --live, --silent and --no-console-output, or none of them."
    require(len(asked) <= 1, f"{' and '.join(map(dashed, asked))} exclude each other: {one}")
    return MODES[asked[0]] if asked else "normal"


def _replay(words: Sequence[str]) -> None:
    """Send the records of runs; raises :class:`UsageError` before anything is sent if any of it cannot be."""
    sinks = {sink.name: sink for sink in SinkRegistry if issubclass(sink, ReplaySink)}
    given = _replay_parser(sinks).parse(words)
    runs, target = given.pop("RUN"), given.pop("to", None)
    number = f"{len(runs)}: {', '.join(runs)}" if runs else "none"
    require(len(runs) == 1, f"loopscope replay takes one folder, RUN, but got {number}.")
    require(target is not None, f"loopscope replay needs --to, which is one of {', '.join(sinks)}.")
    if target not in sinks:
        raise unknown("value of --to:", target, sinks)
    for option in given:
        require(option == sinks[target].option, f"--{option} is no option of --to {target}.")
    sinks[target].check_installed()
    for send in [sinks[target].replay(folder, **given) for folder in run_folders(Path(runs[0]), "replay")]:
        write_line(send())


def _replay_parser(sinks: Mapping[str, type[ReplaySink]]) -> CommandParser:
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


def _say(text: str) -> None:
    if speaks():
        print(f"loopscope: {printable(text)}", file=sys.stderr)  # noqa: T201
