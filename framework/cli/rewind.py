"""``loopscope rewind RUN --step N``: trains a stretch of a run again, bit for bit, with whatever hooks one likes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch

from ..checkpoints import moments_of
from ..console import watch
from ..errors import UsageError, listed
from ..runs import RunFolder, RunRecord, Session, Stretch, check_device, require, run_folders
from ..training import speaks, started_together
from .options import config_of, parse_recorded, run_options, wanted_sinks, without_dots
from .parser import NAMES, CommandParser, write_line


def rewind(words: Sequence[str]) -> None:
    """Train the stretch that the words name, and say where its metrics are and with what it was compared."""
    parser = CommandParser(
        "rewind RUN --step N [--until M] [hooks] | --verify N",
        "Train steps N to M of a run again, from its nearest intact checkpoint before them, with other hooks if you "
        "like. The run is the same, bit for bit, and stays as it is; the metrics lie in RUN/rewinds.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of one run, OUTPUT/EXPERIMENT/STRATEGY")
    parser.add("step", int, "the first step to look at, counted from 1")
    parser.add("until", int, "the last one; by default the same")
    parser.add("from_start", bool, "begin at step 0, so that hooks remember all that came before", default=False)
    parser.add("verify", int, "train so many stretches between two checkpoints again, drawn at random, without hooks")
    parser.add("with_hooks", str, "a group of hooks, in place of those that were on", metavar="GROUP")
    parser.add("hooks", NAMES, "hooks by name, in place of those that were on", default=[], metavar="NAME")
    parser.add("hook_config", NAMES, "options of hooks: hook.option=value", default=[], metavar="H.O=V")
    given = parser.defaults | parser.parse(without_dots(words))
    require(len(given["RUN"]) == 1, "loopscope rewind takes the folder of one run: loopscope rewind RUN --step N.")
    asked = [name for name in ("step", "verify") if given[name] is not None]
    require(len(asked) == 1, "loopscope rewind needs the step to go back to, --step N, or --verify N.")
    if given["verify"] is not None:
        given["with_hooks"] = "none"
    folder, *others = run_folders(Path(given["RUN"][0]), "rewind")
    names = [str(each) for each in (folder, *others)]
    require(not others, f"{given['RUN'][0]} holds {len(names)} runs, and rewind takes one of them: {listed(names, 9)}.")
    record = RunRecord.read(folder)
    experiment, options = parse_recorded(folder)
    options |= {"resume": False, "hook_jsonl": True} | _hooks(given, options, record.treatments)
    if not started_together():
        options["parallel"] = None
    runner = experiment(config_of(experiment, options), _device(folder, options["device"], record))
    session = Session(runner, run_options(options), wanted_sinks(options))
    if given["verify"] is not None:
        _verify(replace(session, make_sinks=list), folder, given["verify"])
        return
    stretch = Stretch(given["step"], given["until"] or given["step"], given["from_start"])
    if not speaks():
        session.rewind(stretch)
        return
    path, since, compared = watch(session, "normal", lambda shown: shown.rewind(stretch))
    write_line(f"Trained again from step {since:,} on; metrics: {path}")
    if compared:
        write_line(f"The run is the same, bit for bit, at steps {listed([*map(str, compared)], 9)}.")
    else:
        write_line("No checkpoint or digest of the run lies in this stretch, so nothing shows that it is the same.")


def _verify(session: Session, folder: Path, number: int) -> None:
    """Train stretches between two checkpoints again; raises where one is not what it was."""
    require(number >= 1, f"--verify is {number}; it must be at least 1.")
    steps = sorted({step for _, step in moments_of(RunFolder(folder, folder.name).checkpoints)})
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
