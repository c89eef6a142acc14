"""The command ``loopscope new``: writes a working hook or experiment and its test as a starting point."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import count
from keyword import kwlist
from pathlib import Path
from shutil import which
from string import Template

from ..durable_files import path_exists
from ..errors import UsageError, require, unknown
from ..hooks import ExperimentRegistry, HookRegistry
from ..hooks.selection import KEYWORDS
from ..optional_packages import install_command
from .parser import CommandParser, write_lines

TEMPLATES = Path(__file__).with_name("templates")
RUNS = {  # the printed command: it takes seconds and writes into a separate folder
    "hook": "mod_arithmetic --preset quick --strategy random --max-epochs 5 --output-dir output/{0} --hooks {0}",
    "experiment": "{0}",
}
OBSERVER = {"base": "TrainingHook", "method": "    def compute(self, ctx):", "doubled": "", "factor": ""}
INTERVENTION = {
    "base": "InterventionHook",
    "method": "    def intervene(self, ctx, model_ctx):\n"
    "        model_ctx.apply_perturbation(dict(model_ctx.model.named_parameters()), scale=1.0)  # undone afterwards",
    "doubled": ", weights doubled",
    "factor": "2 * ",
}


def new_parser() -> CommandParser:
    """Build the parser of ``loopscope new``."""
    parser = CommandParser(
        "new hook|experiment NAME [options]",
        "Write NAME.py, a working hook or experiment, and its test test_NAME.py, as a starting point. Existing files "
        "are never overwritten.",
    )
    parser.add_argument("KIND", nargs="*", help="hook or experiment, followed by NAME")
    intervention = "write a hook that may change the training state, which is then rolled back"
    parser.add_argument("--intervention", action="store_true", help=intervention)
    parser.add("output_dir", Path, "the folder to write into (default: the current folder)", metavar="DIR")
    return parser


def new(words: Sequence[str]) -> None:
    """Write the requested files; raises :class:`UsageError`, and writes nothing, if one cannot be written."""
    given = {"output_dir": Path()} | new_parser().parse(words)
    require(len(given["KIND"]) == 2, "loopscope new takes a kind and a name: loopscope new hook NAME.")
    (kind, word), folder = given["KIND"], given["output_dir"]
    if kind not in RUNS:
        raise unknown("kind of file", kind, RUNS)
    require(kind == "hook" or not given["intervention"], "--intervention applies to hooks only.")
    name = word.replace("-", "_")
    paths = [folder / f"{name}.py", folder / f"test_{name}.py"]
    # A package of that name, or around the files, would keep the test from importing the file next to it.
    _refuse(kind, name, [*paths, folder / name / "__init__.py", folder / "__init__.py"])
    texts = [(TEMPLATES / f"{stem}.txt").read_text("utf-8") for stem in (kind, f"test_{kind}")]
    fields = {"name": name, "title": _class_name(name, kind, " ".join(texts))}
    fields |= INTERVENTION if given["intervention"] else OBSERVER
    _write({path: Template(text).substitute(fields) for path, text in zip(paths, texts, strict=True)})
    is_ours = Path(which("python") or "").parent == Path(sys.executable).parent
    python, script, test = (shlex.quote(str(part)) for part in ("python" if is_ours else sys.executable, *paths))
    advice = "" if find_spec("pytest") else f"  (after {install_command('pytest')})"
    write_lines(
        f"Wrote {paths[0]} and {paths[1]}. To run and test them:",
        f"  {python} {script} run {RUNS[kind].format(name)}",
        f"  {python} -m pytest {test}{advice}",
    )


def _refuse(kind: str, name: str, paths: Sequence[Path]) -> None:
    """Raise :class:`UsageError` for a name that Python does not accept, or that is taken."""
    registry = HookRegistry if kind == "hook" else ExperimentRegistry
    taken = {*registry.names(), *KEYWORDS}
    is_name = re.fullmatch(r"[a-zA-Z]\w{0,29}", name, re.ASCII) is not None and name not in kwlist
    rule = "it must be a letter followed by letters, digits or underscores, at most 30 characters, and not a keyword."
    require(is_name, f"The name is {name!r}; {rule}")
    if name in taken:
        free = next(other for other in (f"{name}_{number}" for number in count(2)) if other not in taken)
        raise UsageError(f"The name {name!r} is taken by another {kind}; {free!r} is free.")
    folder = paths[0].parent
    require(folder.is_dir() or not path_exists(folder), f"--output-dir is {str(folder)!r}, which is not a folder.")
    present = next(filter(path_exists, paths), None)
    require(present is None, f"{present} exists already; choose another name, or another folder with --output-dir.")
    hides = name in (*sys.stdlib_module_names, "conftest") or ((module := find_spec(name)) and module.origin)
    require(not hides, f"The name is {name!r}, and {name}.py would hide the module of that name; choose another name.")


def _class_name(name: str, kind: str, text: str) -> str:
    """Return ``MyName`` for ``my_name``, with the kind appended if the template already uses that word."""
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return title + kind.title() if {title, f"{title}Config"} & {*kwlist, *re.findall(r"\w+", text)} else title


def _write(texts: Mapping[Path, str]) -> None:
    """Write new files, all or none; raises :class:`UsageError` if the file system refuses."""
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
