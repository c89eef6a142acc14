"""The commands that train an experiment, ``loopscope run`` and ``resume``, and ``loopscope replay``."""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from ..console import Mode, watch
from ..errors import unknown
from ..hooks import ExperimentRegistry, SinkRegistry
from ..runs import ReplaySink, Session, check_device, require, run_folders, warn_of_changes
from ..sweeps import require_submitit
from ..training import Parallel, is_main_process, is_restarted, torchrun_world_size
from .jobs import require_all_rows, train_in_parallel
from .options import Options, config_of, parse_recorded, parse_run, plain, run_options, wanted_sinks
from .parser import CommandParser, dashed, write_lines
from .run_parser import Experiment
from .user_errors import user_errors

MODES: dict[str, Mode] = {"verbose": "verbose", "live": "live", "silent": "silent", "no_console_output": "none"}
"""The display of a run, by the flag that selects it."""


def run(words: Sequence[str]) -> None:
    """Train an experiment."""
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


def resume(words: Sequence[str]) -> None:
    """Resume a run from its newest intact checkpoint."""
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
    is_job = options["on"] is not None
    conflict = "--on-options are options of the jobs of --on slurm or --on local; add one of them."
    require(is_job or not options["on_options"], conflict)
    if is_job:
        require_submitit()
        options = options | {"resume": not options["overwrite"]}
    with user_errors(full_traceback=options["traceback"]):
        runner = experiment(config_of(experiment, options), check_device(options["device"]))
        session, mode = Session(runner, run_options(options, experiment), wanted_sinks(options)), _mode(options)
        several = is_job or (options["jobs"] or 1) > 1
        flag = "--on" if is_job else "--jobs"
        conflict = f"{flag} trains several runs, --parallel trains one run in several processes; remove one of them."
        require(not several or session.options.parallel is None, conflict)
        plan = session.planned() if several else []
        if is_job:
            from .submitted_runs import train_as_jobs

            train_as_jobs(plan, options, mode, runner.compared_to)
        elif len(plan) > 1:
            train_in_parallel(plan, options, mode, runner.compared_to)
        else:
            require_all_rows(watch(session, mode) if is_main_process() else session.run())


def _mode(options: Options) -> Mode:
    """Return the display that the flags select; raises :class:`UsageError` for more than one flag."""
    selected = [flag for flag in MODES if options[flag]]
    remedy = "use at most one of --verbose, --live, --silent and --no-console-output."
    require(len(selected) <= 1, f"{' and '.join(map(dashed, selected))} exclude each other: {remedy}")
    return MODES[selected[0]] if selected else "normal"


def replay(words: Sequence[str]) -> None:
    """Send the records of runs; raises :class:`UsageError` before anything is sent if one record cannot be sent."""
    sinks = replay_sinks()
    given = replay_parser().parse(words)
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
        write_lines(send())


def replay_sinks() -> dict[str, type[ReplaySink]]:
    """Return the sinks to which a record can be sent, by name."""
    return {sink.name: sink for sink in SinkRegistry if issubclass(sink, ReplaySink)}


def replay_parser() -> CommandParser:
    """Build the parser of ``loopscope replay``."""
    sinks = replay_sinks()
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
