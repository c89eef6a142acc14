"""``loopscope watch COMMAND``: run a training unchanged, with loopscope attached to what it trains.

The module imports nothing slow: it sets environment variables and replaces itself by the command, so that exit status,
signals, streams and arguments are those of the command.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkstemp
from typing import Any, NoReturn

SITE = Path(__file__).parents[1] / "integrations" / "watch_site"
GROUPS = ("none", "minimal", "health", "observers", "interventions", "full")
ALONE = {"I": "python -I", "S": "python -S", "E": "python -E"}
"""Options with which Python starts without ``PYTHONPATH`` or ``sitecustomize``."""
VARIABLES = (
    *("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "MKL_CBWR"),
)
"""The environment variables on which the bits of a training may depend, which are recorded with its command."""
USAGE = """loopscope watch [OPTIONS] [--] COMMAND ...

Run a training unchanged, with loopscope attached to what it trains: to every loop over an optimizer of torch, and to
the Trainers of Hugging Face and Lightning, also in processes that the command starts.

  loopscope watch python train.py --lr 1e-3
  loopscope watch --stop-after 100 -- torchrun --nproc-per-node 2 train.py
"""


class CommandOfOthers(argparse.ArgumentParser):
    """The parser of a command that starts a command of others, whose options it leaves alone."""

    def error(self, message: str) -> NoReturn:
        """Print one sentence, and exit with status 2."""
        raise SystemExit(refused_command(f"{message}; see {self.prog} --help."))


def refused_command(sentence: str, status: int = 2) -> int:
    """Print a sentence, and return the exit status."""
    sys.stderr.write(f"loopscope: {sentence}\n")
    return status


def positive_count(text: str) -> int:
    """Return a number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _count_from_zero(text: str) -> int:
    return 0 if text == "0" else positive_count(text)


def _budget(text: str) -> str:
    """Return a share of the CPU time, ``none``, or the folder of a run, which is read by attach."""
    if text.lower() == "none":
        return "none"
    number = text.removesuffix("%")
    is_share = bool(re.fullmatch(r"(\d+\.?\d*|\.\d+)(e-?\d+)?", number)) and 0 < float(number) <= (
        1 if number == text else 100
    )
    if is_share or os.path.isdir(text):
        return text if is_share else os.path.abspath(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 5% or 0.05, none, or the folder of a run")


def watch_parser() -> argparse.ArgumentParser:
    """Build the parser of ``loopscope watch``."""
    parser = CommandOfOthers("loopscope watch", usage=USAGE, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--with-hooks", metavar="GROUP", choices=GROUPS, help=f"hooks of a group: {', '.join(GROUPS)} (health)")
    add("--hooks", metavar="NAME", nargs="+", help="hooks by name; put -- before the command")
    add("--out", metavar="DIR", help="the folder of the run (loopscope-runs/run_N)")
    add("--overwrite", action="store_true", help="replace a run in that folder")
    add("--loop", choices=("step", "epoch"), help=argparse.SUPPRESS)
    add("--log-every", metavar="N", type=positive_count, help="steps between two deliveries of metrics (100)")
    every = "steps between two digests of the training state, 0 for none (1, 10, 100, every 1,000 steps, the last)"
    add("--digest-every", metavar="N", type=_count_from_zero, help=every)
    add("--display", choices=("brief", "normal", "verbose", "silent", "none"), help="what is shown (brief)")
    budget = "bound on the hooks' CPU time, as a share of the training's, or none (5%%)"
    add("--budget", metavar="SHARE", type=_budget, help=budget)
    add("--audit", action="store_true", help="compare every byte of the training before and after every hook")
    add("--stop-after", metavar="N", type=positive_count, help="end the command after N steps, with status 0")
    add("--stop-on", choices=("critical", "nonfinite"), help="end the command at such a finding, with status 3")
    add("--seed", metavar="K", type=int, help="add K to every seed that the script sets")
    grid = "run the command once at each point, with --NAME VALUE appended: lr=1e-3,3e-4 seed=0-4"
    add("--grid", metavar="NAME=VALUES", nargs="+", help=grid)
    add("--jobs", metavar="N", type=positive_count, help="with --grid: points at a time (1; with --on slurm all)")
    add("--on", choices=("slurm", "local"), help="with --grid: run each point as a job")
    add(
        "--on-options",
        metavar="NAME=VALUE",
        nargs="+",
        default=[],
        help="options of the jobs, such as gpus=1 time=2:00:00",
    )
    add("--help", "-h", action="help", help="show this text and exit")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def watch(words: Sequence[str]) -> int:
    """Replace this process by the command; return an exit status only if that is not possible."""
    given = vars(watch_parser().parse_args(words))
    command = without_dashes(given.pop("command"))
    if problem := problem_of(command, "watch"):
        return refused_command(*problem)
    sweep = {name: given.pop(name) for name in ("grid", "jobs", "on", "on_options")}
    if sweep["grid"]:
        from .watch_grid import watch_grid

        return watch_grid(command, given, sweep | {name: given.pop(name) for name in ("out", "overwrite")})
    if idle := [f"--{name.replace('_', '-')}" for name, value in sweep.items() if value]:
        return refused_command(f"{idle[0]} is an option of --grid; add --grid NAME=VALUE,VALUE.")
    seed = given.pop("seed")
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    if not {"hooks", "with_hooks"} & options.keys():
        options["with_hooks"] = "health"
    if "out" in options:
        options["out"] = os.path.abspath(options["out"])
    os.environ |= watched_environment(command, options, seed or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execvp(command[0], command)


def without_dashes(command: list[str]) -> list[str]:
    """Return a command without the ``--`` that may precede it."""
    return command[1:] if command[:1] == ["--"] else command


def problem_of(command: Sequence[str], name: str) -> tuple[str, int] | None:
    """Return why ``loopscope NAME`` cannot run a command, and the exit status, if so."""
    if not command:
        return f"{name} needs the command of a training: loopscope {name} python train.py.", 2
    if flag := _runs_alone(command):
        return f"{flag} starts Python without what loopscope {name} needs; leave the option out.", 2
    if shutil.which(command[0]) is None:
        return f"{command[0]!r} is not a command; give one such as python train.py.", 127
    return None


def watched_environment(command: Sequence[str], options: Mapping[str, Any], seed: int = 0) -> dict[str, str]:
    """Return the variables with which the processes of a command attach loopscope to what they train."""
    handle, started = mkstemp(prefix="loopscope-watch-")
    os.close(handle)
    origin = {
        "command": command,
        "folder": os.getcwd(),
        "options": options,
        "seed": seed,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    return {**variables(options, origin, started), "LOOPSCOPE_WATCH_ROOT": str(os.getpid())}


def variables(options: Mapping[str, Any], origin: Mapping[str, Any], started: str) -> dict[str, str]:
    """Return the environment variables with which the processes of a command attach to their trainings.

    Args:
        options: the options of attach.
        origin: what the records say about the command.
        started: the file in which every process that has attached is noted.
    """
    paths = [str(SITE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "LOOPSCOPE_WATCH": json.dumps(options),
        "LOOPSCOPE_WATCH_COMMAND": json.dumps(origin),
        "LOOPSCOPE_WATCH_STARTED": started,
        **({"LOOPSCOPE_WATCH_SEED": str(origin["seed"])} if origin["seed"] else {}),
    }


def _runs_alone(command: Sequence[str]) -> str:
    """Return the option with which the command's Python ignores ``PYTHONPATH`` or ``sitecustomize``, if any."""
    if re.fullmatch(r"(python|pypy)[\d.]*(\.exe)?", Path(command[0]).name):
        for word in command[1:]:
            if not word.startswith("-") or word.startswith("--") or word in ("-c", "-m", "-"):
                return ""
            for letter in word[1:]:
                if letter in ALONE:
                    return ALONE[letter]
    return ""
