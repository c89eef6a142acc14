"""``loopscope rewind RUN --step N``: trains a stretch of a run again, bit for bit, with whatever hooks one likes."""

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
from ..explaining import explain, rows_by_step, rows_told, told
from ..hooks import ALERTS
from ..report import look_at
from ..runs import ExperimentRunner, RunFolder, RunRecord, Session, Stretch, check_device, read_outcome, run_folders
from ..training import speaks, started_together
from .options import config_of, parse_recorded, run_options, wanted_sinks, without_dots
from .parser import NAMES, CommandParser, line_width, write_line

ROWS_HOOK, MOST_STEPS = "batch_rows", 5  # what measures rows, and of how many steps they are shown


def rewind(words: Sequence[str]) -> None:
    """Train the stretch that the words name, and say where its metrics are and with what it was compared."""
    parser = CommandParser(
        "rewind RUN --step N [--until M] [hooks] | --step N --explain | --spike | --verify N",
        "Train steps N to M of a run again, from its nearest intact checkpoint before them, with other hooks if you "
        "like. The run is the same, bit for bit, and stays as it is; the metrics lie in RUN/rewinds.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of one run, OUTPUT/EXPERIMENT/STRATEGY")
    parser.add("step", int, "the first step to look at, counted from 1")
    parser.add("until", int, "the last one; by default the same")
    parser.add("from_start", bool, "begin at step 0, so that hooks remember all that came before", default=False)
    parser.add("verify", int, "train so many stretches between two checkpoints again, drawn at random, without hooks")
    parser.add("explain", bool, "say what left its history first in the steps up to N, and why", default=False)
    spike = "explain the step of the first alert in the record, one of a spike if there is any"
    parser.add("spike", bool, spike, default=False)
    parser.add("with_hooks", str, "a group of hooks, in place of those that were on", metavar="GROUP")
    parser.add("hooks", NAMES, "hooks by name, in place of those that were on", default=[], metavar="NAME")
    parser.add("hook_config", NAMES, "options of hooks: hook.option=value", default=[], metavar="H.O=V")
    given = parser.defaults | parser.parse(without_dots(words))
    require(len(given["RUN"]) == 1, "loopscope rewind takes the folder of one run: loopscope rewind RUN --step N.")
    asked = [name for name in ("step", "verify", "spike") if given[name] is not None and given[name] is not False]
    require(len(asked) == 1, "loopscope rewind needs the step to go back to, --step N, or --spike, or --verify N.")
    folder, *others = found = run_folders(Path(given["RUN"][0]), "rewind")
    require(not others, f"{given['RUN'][0]} holds {len(found)} runs, and rewind takes one of them: {listed(found, 9)}.")
    record = RunRecord.read(folder)
    experiment, options = parse_recorded(folder)
    options |= {"resume": False, "hook_jsonl": True}
    if not started_together():
        options["parallel"] = None
    runner = experiment(config_of(experiment, options), _device(folder, options["device"], record))

    def session(**hooks: Any) -> Session:
        of_hooks = _hooks({"with_hooks": None, "hooks": [], "hook_config": [], **hooks}, options, record.treatments)
        chosen = options | of_hooks
        return Session(runner, run_options(chosen), wanted_sinks(chosen))

    if given["verify"] is not None:
        _verify(replace(session(with_hooks="none"), make_sinks=list), folder, given["verify"])
    elif given["explain"] or given["spike"]:
        hooks = given["with_hooks"] or given["hooks"] or given["hook_config"]
        require(not hooks, "--explain chooses its hooks itself; leave out the others.")
        require(given["until"] is None, "--explain is about one step; leave out --until.")
        step = _step_of_alert(folder) if given["spike"] else given["step"]
        _explain(session, folder, step, runner, record)
    else:
        stretch = Stretch(given["step"], given["until"] or given["step"], given["from_start"])
        _train(session(**{name: given[name] for name in ("with_hooks", "hooks", "hook_config")}), stretch, runner)


def _train(session: Session, stretch: Stretch, runner: ExperimentRunner[Any]) -> None:
    """Train the stretch again, say where its metrics are, and show the rows with the largest losses if they are."""
    if not speaks():
        session.rewind(stretch)
        return
    path, since, compared = watch(session, "normal", lambda shown: shown.rewind(stretch))
    measured = ROWS_HOOK in session.options.hooks
    rows = rows_by_step(look_at(path).points, ROWS_HOOK, runner.describe_row) if measured else {}
    for step in range(stretch.step, min(stretch.until, stretch.step + MOST_STEPS - 1) + 1):
        if step in rows:
            write_line(f"Step {step:,}: the rows with the largest losses of {len(rows[step])}")
            for line in rows_told(rows[step], line_width()):
                write_line(line)
    write_line(f"Trained again from step {since:,} on; metrics: {path}")
    if compared:
        write_line(f"The run is the same, bit for bit, at steps {listed([*compared], 9)}.")
    else:
        write_line("No checkpoint or digest of the run lies in this stretch, so nothing shows that it is the same.")


def _explain(
    session: Callable[..., Session], folder: Path, step: int, runner: ExperimentRunner[Any], record: RunRecord
) -> None:
    """Explain a step, and say what was found."""

    def train_again(stretch: Stretch, hook: str, hook_options: Mapping[str, Any]) -> Path:
        config = [f"{hook}.{name}={value}" for name, value in hook_options.items()]
        again = session(with_hooks="none", hooks=[hook], hook_config=config)
        return Path(watch(again, "silent", lambda shown: shown.rewind(stretch))[0])

    ended = read_outcome(folder)
    last = None if ended is None else ended["steps"] + (ended["status"] != "completed")
    require(last is None or step <= last, f"--step is {step:,}, but the last step of the run in {folder} is {last}.")
    treatments = [*record.treatments]
    explanation = explain(train_again, folder, step, describe_row=runner.describe_row, left_out=treatments, last=last)
    for line in told(explanation, line_width()):
        write_line(line)


def _step_of_alert(folder: Path) -> int:
    """Return the step of the first alert, of one that tells of a spike if there is any."""
    path = folder / ALERTS
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    alerts = [alert for alert in map(json.loads, lines) if not alert.get("is_over")]
    remedy = "name the step, --step N --explain. Spikes are told by the hook loss_spikes."
    require(bool(alerts), f"{folder} has no alerts; {remedy}")
    first = min(alerts, key=lambda alert: ("spike" not in alert["hook"], alert["step"]))
    write_line(f"Step {first['step']:,}: {first['sentence']}")
    return int(first["step"])


def _verify(session: Session, folder: Path, number: int) -> None:
    """Train stretches between two checkpoints again; raises where one is not what it was."""
    require(number >= 1, f"--verify is {number}; it must be at least 1.")
    steps = sorted({step for _, step in checkpoints_by_moment(RunFolder(folder, folder.name).checkpoints)})
    between = [Stretch(before + 1, after) for before, after in pairwise([0, *steps])]
    remedy = "run with --validate-checkpoints compares with its digests"
    require(bool(between), f"{folder} holds no intact checkpoints to begin from; {remedy}.")
    for stretch in sorted(Random().sample(between, min(number, len(between))), key=lambda each: each.step):
        session.rewind(stretch, recorded=False)
        if speaks():
            write_line(f"Steps {stretch.step:,} to {stretch.until:,}: the same, bit for bit.")


def _device(folder: Path, name: str | None, record: RunRecord) -> torch.device:
    """Return the kind of device on which a run was trained; raises :class:`UsageError` where there is none here."""
    name = name or str(record.environment.get("device", "cpu")).partition(":")[0]
    try:
        return check_device(name)
    except UsageError as error:
        raise UsageError(f"{folder} was trained on {name!r}, on other devices its bits are others. {error}") from error


def _hooks(given: Mapping[str, Any], before: Mapping[str, Any], treatments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options about hooks: those that are asked for, and committing ones as they were."""
    if not (given["with_hooks"] or given["hooks"]):
        return {"hook_config": [*before["hook_config"], *given["hook_config"]]}
    kept = [name for name in before["hooks"] if name.replace("-", "_") in treatments]
    config = [each for each in before["hook_config"] if each.partition(".")[0] in treatments]
    hooks = [*kept, *(name for name in given["hooks"] if name not in kept)]
    return {"with_hooks": given["with_hooks"], "hooks": hooks, "hook_config": [*config, *given["hook_config"]]}
