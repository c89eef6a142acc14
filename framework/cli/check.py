"""``loopscope check COMMAND``: try the laws that every training obeys on the first batches of a training.

The training runs in a separate process with the hook ``laws``; this one shows what the hook finds.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .check_progress import run_with_progress
from .watch import CommandOfOthers, positive_count, problem_of, refused_command, watched_environment, without_dashes

USAGE = """loopscope check [--laws NAMES] [--batches N] [--continue] [--json] [--] COMMAND ...
       loopscope check [OPTIONS] EXPERIMENT

Try laws that every training obeys on the first batches of a script, or of an experiment: rows do not mix, the future is
not seen, every parameter learns, micro-batches add up. Every try is rolled back; then the command ends. What the doctor
finds in the set-up of the training is shown, too. The exit status is 0 if no law is broken and nothing was found, 1
otherwise, and 2 if no law could be tried.

  loopscope check python train.py --lr 1e-3
  loopscope check -- torchrun --nproc-per-node 2 train.py
  loopscope check mod_arithmetic
"""
EVERY = 4
"""Steps between two batches on which laws are tried: steps 1, 5, 9, …"""
SYMPTOMS = ("every_parameter_learns", "input_matters", "loss_starts_at_chance", "one_batch_can_be_learned")
"""Laws whose break may follow from that of another one; broken ones are listed last, in this order."""
OBSERVERS = ["training_checks"]
"""The hooks whose record shows mistakes in the set-up."""
SURE = 0.9
"""The least confidence of a finding that is shown."""
FILE = "laws.json"
ALONE = "LOOPSCOPE_WATCH_ALONE"
"""The variable with which ranks that a model does not show are attached one by one."""


def check_parser() -> argparse.ArgumentParser:
    """Build the parser of ``loopscope check``."""
    parser = CommandOfOthers("loopscope check", usage=USAGE, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--laws", metavar="NAMES", help="the laws to try, separated by commas (all)")
    add(
        "--batches",
        metavar="N",
        type=positive_count,
        default=3,
        help="batches on which they are tried: steps 1, 5, 9, … (3)",
    )
    add("--continue", dest="continues", action="store_true", help="let the command continue after the check")
    add("--json", action="store_true", help="write one JSON object of at most 4 kB")
    add("--help", "-h", action="help", help="show this text and exit")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def check(words: Sequence[str]) -> int:
    """Run the training with the hook, show the results, and return the exit status."""
    given = check_parser().parse_args(words)
    command = without_dashes(given.command)
    if not command:
        return refused_command(
            "check needs the command of a training, or an experiment: loopscope check python train.py."
        )
    names = [name.strip().replace("-", "_") for name in (given.laws or "").split(",") if name.strip()]
    if names and (sentence := _unknown_law(names)):
        return refused_command(sentence)
    steps = [1 + EVERY * index for index in range(given.batches)]
    hooks = ["laws", *([] if names else OBSERVERS)]
    experiment = _experiment(command)
    if experiment is None and (problem := problem_of(command, "check")):
        return refused_command(*problem)
    with tempfile.TemporaryDirectory(prefix="loopscope-check-") as folder:
        out = Path(folder, "run")
        if experiment is None:
            options: dict[str, Any] = {
                "hooks": hooks,
                "hook_options": {"laws": {"only": names, "steps": steps, "continues": given.continues}},
                "out": str(out),
                "display": "none",
            }
            # Compiled code hides what a law tries, so the script's own compilation is disabled.
            settings = {"TORCHDYNAMO_DISABLE": "1", ALONE: "1", **watched_environment(command, options)}
            stdout = sys.stderr if given.json else None
            status = run_with_progress(command, settings, partial(_content, out), (stdout, None))
        else:
            words = [*command[1:], "--hooks", *hooks, "--hook-config", f"laws.steps={steps}", f"laws.only={names}"]
            command = [sys.executable, "-m", "loopscope", "run", experiment, *words, "--output-dir", str(out)]
            with tempfile.TemporaryFile("w+") as messages:
                words = [*command, "--silent"]
                status = run_with_progress(
                    words, {}, partial(_content, out), (messages, messages), ends=not given.continues
                )
                messages.seek(0)
                if not _content(out):
                    sys.stderr.write(messages.read())
        content = _all_content(out)
        if content:
            content["findings"] = _findings(out, content["laws"])
            if not (content["is_ended"] or given.continues or experiment):
                content["note"] = "The command has run to its end, and has written its own files."
        return _show(content, given, status)


def _experiment(command: Sequence[str]) -> str | None:
    """Return the name of the experiment that a command consists of, if so."""
    import shutil

    word = command[0]
    is_command = os.sep in word or word.startswith("python") or shutil.which(word) is not None
    return None if is_command or word.startswith("-") else word


def _unknown_law(names: Sequence[str]) -> str:
    import loopscope.laws.shipped  # noqa: F401
    from loopscope.errors import unknown
    from loopscope.laws import LawRegistry

    known = LawRegistry.names()
    return next((str(unknown("law", name, known)) for name in names if name not in known), "")


def _content(out: Path) -> dict[str, Any]:
    """Return what the hook has written: the results so far of the first training."""
    try:
        found = next(iter(sorted(out.rglob(FILE))), None) if out.is_dir() else None
        return {} if found is None else json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _all_content(out: Path) -> dict[str, Any]:
    """Return the results of the first training, with the broken laws of further ones, and a note on what is missing.

    A further training whose laws were not tried at all steps shows nothing.
    """
    content, number, notes = _content(out), 1, list[str]()
    while content and (further := _content(out.with_name(f"{out.name}-{number + 1}"))):
        number += 1
        if further["tried"] >= further["total"]:
            notes.append(f"Laws were also tried in training {number}.")
            content["broken"] += further["broken"]
            content["laws"] += [{**law, "training": number} for law in further["laws"] if law["verdict"] == "broken"]
    if content.get("is_ended"):
        notes.append(
            "The command was ended here: --continue also tries later trainings, and files that are saved later."
        )
    return {**content, "note": " ".join(notes)} if notes else content


def _findings(out: Path, laws: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the doctor finds in the set-up of the first training, without what a law has decided."""
    from loopscope.doctor import diagnose
    from loopscope.errors import UsageError
    from loopscope.runs import read_history

    path = next(iter(sorted(out.rglob(FILE))), None) if laws else None
    try:
        findings = [] if path is None else diagnose(read_history(path.parent)).at_least("warning")
    except UsageError:  # a command that was killed may leave no complete record
        return []
    decided = {law["law"] for law in laws if law["verdict"] != "not checked"}
    return [
        {"id": item.id, "severity": item.severity, "step": item.step, "why": item.why, "next": item.next}
        for item in findings
        if item.stage == "set-up" and item.confidence >= SURE and item.law not in decided
    ]


def _show(content: Mapping[str, Any], given: argparse.Namespace, status: int) -> int:
    """Show the results, and return the exit status."""
    if not content or not content["tried"]:
        after = (
            f"the command ended with status {status} before its first step"
            if status
            else "no module over the parameters of its optimizer was seen to train"
        )
        return refused_command(
            f"No law was tried, since {after}: check a command that trains with an optimizer of torch."
        )
    laws = content["laws"]
    if given.json:
        sys.stdout.write(f"{_bounded(content)}\n")
    else:
        _write_table(laws, content["findings"])
        _write_end(content)
    return 1 if content["broken"] or content["findings"] else 0


def _bounded(content: Mapping[str, Any], most: int = 4096) -> str:
    """Return the results as JSON of limited size: broken laws first, and reasons only as long as they fit."""
    order = ("broken", "not checked", "holds")
    laws = _sorted(content["laws"], order)
    result = {"schema": 1, **{name: content[name] for name in (*order, "note") if name in content}}
    long = ("evidence", "remedy", "why", "next")
    for length in (400, 200, 100, 40, 0):
        short = {
            place: [
                {
                    name: value[:length] if name in long and isinstance(value, str) else value
                    for name, value in item.items()
                    if length or name not in (*long, "statement")
                }
                for item in items
            ]
            for place, items in (("findings", content["findings"]), ("laws", laws))
        }
        text = json.dumps({**result, **short})
        if len(text) < most:
            return text
    return json.dumps({name: result[name] for name in ("schema", *order)})


def _sorted(laws: Sequence[Mapping[str, Any]], verdicts: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the laws in the order of their verdicts, causes before symptoms."""
    by_place = sorted(laws, key=_place)
    return [law for verdict in verdicts for law in by_place if law["verdict"] == verdict]


def _place(law: Mapping[str, Any]) -> int:
    is_symptom = law["verdict"] == "broken" and law["law"] in SYMPTOMS
    return SYMPTOMS.index(law["law"]) + 1 if is_symptom else 0


def _write_table(laws: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]) -> None:
    """Write one line for each finding and each law, and below a problem what to do next."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {"holds": "green", "broken": "bold red", "not checked": "dim"}

    def add(kind: str, text: str, *lines: str) -> None:
        table.add_row(Text(kind, style=styles.get(kind, "bold red")), Text(text))
        for line in lines:
            table.add_row("", Padding(Text(line), (0, 0, 0, 2)))

    broken, others = _sorted(laws, ("broken",)), _sorted(laws, ("holds", "not checked"))
    for item in findings:
        add("found", f"{item['why']} ({item['id']}, step {item['step']})", f"next: {item['next']}")
    for law in broken:
        place = f"in training {law['training']}, " if "training" in law else ""
        text = f"{place}{law['statement']}: {law.get('evidence', '')} (step {law['step']})"
        add("broken", text, f"next: {law['remedy']}", f"alone: loopscope check --laws {law['law']} ...")
    for law in others:
        table.add_row(
            Text(law["verdict"], style=styles[law["verdict"]]),
            Text.assemble(law["statement"], (f" ({law['evidence']})" if law.get("evidence") else "", "dim")),
        )
    Console(highlight=False).print(table)


def _write_end(content: Mapping[str, Any]) -> None:
    """Write how many laws have which verdict, and the note."""
    from rich.console import Console
    from rich.text import Text

    names = dict.fromkeys(law["law"] for law in _sorted(content["laws"], ("broken",)))
    found = f"Found in the set-up: {', '.join(item['id'] for item in content['findings'])}. "
    counts = f"Laws: {content['broken']} broken, {content['holds']} hold, {content['not checked']} not checked."
    console = Console(highlight=False)
    console.print(Text(f"{found if content['findings'] else ''}{counts}{' Broken: ' * bool(names)}{', '.join(names)}"))
    if note := content.get("note"):
        console.print(Text(note, style="dim"))
