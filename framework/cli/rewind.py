"""The command ``loopscope rewind``: repeats some steps of a run bit for bit, with any hooks."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch

from ..checkpoints import checkpoints_by_moment
from ..console import watch
from ..errors import UsageError, listed, require
from ..explaining import explain, explanation_lines, row_table, rows_by_step
from ..hooks import ALERTS
from ..report import inspect_run
from ..runs import ExperimentRunner, RunFolder, RunRecord, Session, Stretch, check_device, read_outcome, run_folders
from ..training import is_main_process, torchrun_world_size
from .options import config_of, parse_recorded, run_options, wanted_sinks, without_dots
from .parser import NAMES, CommandParser, line_width, write_line

ROWS_HOOK, MOST_STEPS = "batch_rows", 5  # the hook that measures rows, and the number of steps whose rows are shown


def rewind(words: Sequence[str]) -> None:
    """Repeat the requested steps, and report the folder of their metrics and the result of the comparison."""
    parser = CommandParser(
        "rewind RUN --step N [--until M] [hooks] | --step N --explain | --spike | --verify N",
        "Repeat steps N to M of a run bit for bit, from the nearest earlier intact checkpoint, optionally with other "
        "hooks. The run itself is not changed; the metrics are written to RUN/rewinds.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of one run, OUTPUT/EXPERIMENT/STRATEGY")
    parser.add("step", int, "the first step, counted from 1")
    parser.add("until", int, "the last step (default: the first)")
    parser.add("from_start", bool, "start at step 0, so that hooks have seen all earlier steps", default=False)
    parser.add("verify", int, "repeat N random intervals between two checkpoints without hooks, and compare")
    parser.add(
        "explain",
        bool,
        "report the first quantity that departs from its history in the steps up to N, and the cause",
        default=False,
    )
    spike = "explain the step of the first alert in the record; alerts about spikes come first"
    parser.add("spike", bool, spike, default=False)
    parser.add("with_hooks", str, "a group of hooks, instead of the original hooks", metavar="GROUP")
    parser.add("hooks", NAMES, "names of hooks, instead of the original hooks", default=[], metavar="NAME")
    parser.add("hook_config", NAMES, "options of hooks: hook.option=value", default=[], metavar="H.O=V")
    given = parser.defaults | parser.parse(without_dots(words))
    require(len(given["RUN"]) == 1, "loopscope rewind takes the folder of one run: loopscope rewind RUN --step N.")
    modes = [name for name in ("step", "verify", "spike") if given[name] is not None and given[name] is not False]
    require(len(modes) == 1, "loopscope rewind needs one of --step N, --spike and --verify N.")
    folder, *others = folders = run_folders(Path(given["RUN"][0]), "rewind")
    require(not others, f"{given['RUN'][0]} has {len(folders)} runs; rewind takes one of them: {listed(folders, 9)}.")
    record = RunRecord.read(folder)
    experiment, options = parse_recorded(folder)
    options |= {"resume": False, "hook_jsonl": True}
    if not torchrun_world_size():
        options["parallel"] = None
    runner = experiment(config_of(experiment, options), _device(folder, options["device"], record))

    def session(**hooks: Any) -> Session:
        of_hooks = _hooks({"with_hooks": None, "hooks": [], "hook_config": [], **hooks}, options, record.treatments)
        session_options = options | of_hooks
        return Session(runner, run_options(session_options), wanted_sinks(session_options))

    if given["verify"] is not None:
        _verify(replace(session(with_hooks="none"), make_sinks=list), folder, given["verify"])
    elif given["explain"] or given["spike"]:
        hooks = given["with_hooks"] or given["hooks"] or given["hook_config"]
        require(not hooks, "--explain chooses its own hooks; remove --with-hooks, --hooks and --hook-config.")
        require(given["until"] is None, "--explain applies to one step; remove --until.")
        step = _step_of_alert(folder) if given["spike"] else given["step"]
        _explain(session, folder, step, runner, record)
    else:
        stretch = Stretch(given["step"], given["until"] or given["step"], given["from_start"])
        _train(session(**{name: given[name] for name in ("with_hooks", "hooks", "hook_config")}), stretch, runner)


def _train(session: Session, stretch: Stretch, runner: ExperimentRunner[Any]) -> None:
    """Repeat the steps, report the folder of their metrics, and show the rows with the largest losses if measured."""
    if not is_main_process():
        session.rewind(stretch)
        return
    path, since, compared = watch(session, "normal", lambda shown: shown.rewind(stretch))
    measured = ROWS_HOOK in session.options.hooks
    rows = rows_by_step(inspect_run(path).points, ROWS_HOOK, runner.describe_row) if measured else {}
    for step in range(stretch.step, min(stretch.until, stretch.step + MOST_STEPS - 1) + 1):
        if step in rows:
            write_line(f"Step {step:,}: the largest losses of {len(rows[step])} rows")
            for line in row_table(rows[step], line_width()):
                write_line(line)
    write_line(f"Repeated the run from step {since:,}; metrics: {path}")
    if compared:
        write_line(f"The run is identical, bit for bit, at steps {listed([*compared], 9)}.")
    else:
        write_line("The run has no checkpoint or digest in these steps, so they could not be compared.")


def _explain(
    session: Callable[..., Session], folder: Path, step: int, runner: ExperimentRunner[Any], record: RunRecord
) -> None:
    """Explain a step, and print the explanation."""

    def train_again(stretch: Stretch, hook: str, hook_options: Mapping[str, Any]) -> Path:
        config = [f"{hook}.{name}={value}" for name, value in hook_options.items()]
        repeated = session(with_hooks="none", hooks=[hook], hook_config=config)
        return Path(watch(repeated, "silent", lambda shown: shown.rewind(stretch))[0])

    outcome = read_outcome(folder)
    last = None if outcome is None else outcome["steps"] + (outcome["status"] != "completed")
    require(last is None or step <= last, f"--step is {step:,}, but the last step of the run in {folder} is {last}.")
    treatments = [*record.treatments]
    explanation = explain(train_again, folder, step, describe_row=runner.describe_row, left_out=treatments, last=last)
    for line in explanation_lines(explanation, line_width()):
        write_line(line)


def _step_of_alert(folder: Path) -> int:
    """Return the step of the first alert; alerts about spikes take precedence."""
    path = folder / ALERTS
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    alerts = [alert for alert in map(json.loads, lines) if not alert.get("is_over")]
    remedy = "name the step with --step N --explain. The hook loss_spikes reports spikes."
    require(bool(alerts), f"{folder} has no alerts; {remedy}")
    first = min(alerts, key=lambda alert: ("spike" not in alert["hook"], alert["step"]))
    write_line(f"Step {first['step']:,}: {first['sentence']}")
    return int(first["step"])


def _verify(session: Session, folder: Path, number: int) -> None:
    """Repeat intervals between two checkpoints; raises :class:`LoopscopeError` if one differs."""
    require(number >= 1, f"--verify is {number}; it must be at least 1.")
    steps = sorted({step for _, step in checkpoints_by_moment(RunFolder(folder, folder.name).checkpoints)})
    intervals = [Stretch(start + 1, end) for start, end in pairwise([0, *steps])]
    remedy = "loopscope run with --validate-checkpoints compares with its digests"
    require(bool(intervals), f"{folder} has no intact checkpoint to start from; {remedy}.")
    for stretch in sorted(Random().sample(intervals, min(number, len(intervals))), key=lambda stretch: stretch.step):
        session.rewind(stretch, recorded=False)
        if is_main_process():
            write_line(f"Steps {stretch.step:,} to {stretch.until:,}: identical, bit for bit.")


def _device(folder: Path, name: str | None, record: RunRecord) -> torch.device:
    """Return the kind of device that a run was trained on; raises :class:`UsageError` if it is not available."""
    name = name or str(record.environment.get("device", "cpu")).partition(":")[0]
    try:
        return check_device(name)
    except UsageError as error:
        raise UsageError(f"{folder} was trained on {name!r}, and other devices give other bits. {error}") from error


def _hooks(given: Mapping[str, Any], recorded: Mapping[str, Any], treatments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options about hooks: the requested hooks, and the original hooks that commit changes."""
    if not (given["with_hooks"] or given["hooks"]):
        return {"hook_config": [*recorded["hook_config"], *given["hook_config"]]}
    kept = [name for name in recorded["hooks"] if name.replace("-", "_") in treatments]
    config = [option for option in recorded["hook_config"] if option.partition(".")[0] in treatments]
    hooks = [*kept, *(name for name in given["hooks"] if name not in kept)]
    return {"with_hooks": given["with_hooks"], "hooks": hooks, "hook_config": [*config, *given["hook_config"]]}
