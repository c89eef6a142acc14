"""``loopscope new``: writes a hook or an experiment that runs, with its test, for the user to change."""

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

from ..durable_files import is_there
from ..errors import UsageError, require, unknown
from ..hooks import KEYWORDS, ExperimentRegistry, HookRegistry
from .parser import CommandParser, write_line

TEMPLATES = Path(__file__).with_name("templates")
RUNS = {  # what the first command runs: seconds, and in a folder of its own
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


def new(words: Sequence[str]) -> None:
    """Write what the words ask for; raises :class:`UsageError`, and leaves nothing, where any of it cannot be."""
    parser = CommandParser(
        "new hook|experiment NAME [options]",
        "Write NAME.py, a hook or an experiment that runs, and test_NAME.py, which tests it; change both as you like. "
        "No file is written over.",
    )
    parser.add_argument("KIND", nargs="*", help="hook or experiment, and then NAME")
    parser.add_argument("--intervention", action="store_true", help="a hook that changes the run, and is rolled back")
    parser.add("output_dir", Path, "where to write; by default the present folder", metavar="DIR")
    given = {"output_dir": Path()} | parser.parse(words)
    require(len(given["KIND"]) == 2, "loopscope new takes two words, what and its name: loopscope new hook NAME.")
    (kind, word), folder = given["KIND"], given["output_dir"]
    if kind not in RUNS:
        raise unknown("kind of file", kind, RUNS)
    require(kind == "hook" or not given["intervention"], "--intervention goes with hook only.")
    name = word.replace("-", "_")
    paths = [folder / f"{name}.py", folder / f"test_{name}.py"]
    _refuse(kind, name, [*paths, folder / name / "__init__.py", folder / "__init__.py"])  # a test imports its neighbour
    texts = [(TEMPLATES / f"{stem}.txt").read_text("utf-8") for stem in (kind, f"test_{kind}")]
    fields = {"name": name, "title": _class_name(name, kind, " ".join(texts))}
    fields |= INTERVENTION if given["intervention"] else OBSERVER
    _write({path: Template(text).substitute(fields) for path, text in zip(paths, texts, strict=True)})
    is_ours = Path(which("python") or "").parent == Path(sys.executable).parent
    python, script, test = (shlex.quote(str(part)) for part in ("python" if is_ours else sys.executable, *paths))
    write_line(f"{paths[0]} and {paths[1]} are written. Run it, then test it:")
    write_line(f"  {python} {script} run {RUNS[kind].format(name)}")
    write_line(f"  {python} -m pytest {test}" + ("" if find_spec("pytest") else "  (after pip install pytest)"))


def _refuse(kind: str, name: str, paths: Sequence[Path]) -> None:
    """Raise :class:`UsageError` for a name that Python, loopscope or the folder has no place for."""
    registry = HookRegistry if kind == "hook" else ExperimentRegistry
    taken = {*registry.names(), *KEYWORDS}
    is_name = re.fullmatch(r"[a-zA-Z]\w{0,29}", name, re.ASCII) is not None and name not in kwlist
    rule = "it must be a letter and then letters, digits and underscores, at most 30, and no word of Python."
    require(is_name, f"The name is {name!r}; {rule}")
    if name in taken:
        free = next(other for other in (f"{name}_{number}" for number in count(2)) if other not in taken)
        raise UsageError(f"The name {name!r} is taken by another {kind}; {free!r} is free.")
    folder = paths[0].parent
    require(folder.is_dir() or not is_there(folder), f"--output-dir is {str(folder)!r}, which is no folder.")
    for path in paths:
        require(not is_there(path), f"{path} exists and is in the way; choose another name, or folder (--output-dir).")
    if name in (*sys.stdlib_module_names, "conftest") or ((found := find_spec(name)) and found.origin):
        raise UsageError(f"The name is {name!r}, which is that of a module that {name}.py would hide; choose another.")


def _class_name(name: str, kind: str, text: str) -> str:
    """Return ``MyName`` for ``my_name``, made longer where a word of the template's text is spelled so already."""
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return title + kind.title() if {title, f"{title}Config"} & {*kwlist, *re.findall(r"\w+", text)} else title


def _write(texts: Mapping[Path, str]) -> None:
    """Write new files, all or none; raises :class:`UsageError` where the file system refuses."""
    written: list[Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except BaseException as error:
        for begun in written:
            begun.unlink()
        if not isinstance(error, OSError):
            raise
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
