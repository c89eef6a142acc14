"""Runner of a page's contents: Python blocks in one namespace, files as scripts, commands by the command line."""

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.cli.check import check_parser
from loopscope.cli.options import config_of, parse_run, run_options, without_dots
from loopscope.cli.rewind import rewind_parser
from loopscope.cli.verify import verify_parser
from loopscope.cli.watch import watch_parser
from loopscope.hooks import ExperimentRegistry, HookRegistry, SinkRegistry
from loopscope.lowbit.casts import FormatRegistry, RuleRegistry

from tests.docs.markdown import ROOT, Block, blocks

FILLED = (experiments, sinks, training_hooks)
STARTING = {"watch": watch_parser, "check": check_parser}
REPEATING = {"rewind": rewind_parser, "verify": verify_parser}
REGISTRIES = (ExperimentRegistry, HookRegistry, SinkRegistry, FormatRegistry, RuleRegistry)
SMALL = {
    "mod_arithmetic": "--p 11 --train-size 60 --test-size 40 --batch-size 16 --embed-dim 8 --num-heads 2 --layers 1"
    " --ff-dim 8 --epochs 2 --max-epochs 2 --snapshot-every 1",
    "tied_lm": "--vocabulary 300 --context 16 --width 16 --layers 1 --heads 2 --batch-size 4 --steps 8 --warmup-steps 1"
    " --evaluation-windows 4 --sample-tokens 5",
    "lowbit_lm": "--vocabulary 300 --context 16 --width 16 --layers 1 --heads 2 --batch-size 4 --steps 4"
    " --warmup-steps 1 --evaluation-windows 4 --sample-tokens 5 --rank 0.25 --forward-warmup-steps 1 --merge-steps 2",
}
"""Options that make the pages' experiments small."""
PARSED = {
    "make test": "runs these tests, and takes minutes",
    "make fast": "runs most of these tests, and takes minutes",
    "make lint": "runs before a merge, and takes minutes",
}
"""Commands of the pages that are only parsed, each with the reason."""
LANGUAGES = {"python", "console", "yaml", "toml", "json", "text"}


@contextmanager
def restored_registries() -> Iterator[None]:
    """Unregister the registrations of the body."""
    names_before = [registry.names() for registry in REGISTRIES]
    try:
        yield
    finally:
        for registry, names in zip(REGISTRIES, names_before, strict=True):
            for name in set(registry.names()) - set(names):
                registry.unregister(name)


def status_of(command: Callable[[], Any]) -> int:
    """Run a function that returns its exit status, or raises it."""
    try:
        return int(command() or 0)
    except SystemExit as error:
        return int(error.code or 0)


def is_of_watched_runs(words: Sequence[str]) -> bool:
    """Return whether a command starts a training in another process: watches or checks it, or repeats a watched one."""
    return words[0] in STARTING or (words[0] in REPEATING and words[1].startswith("loopscope-runs/"))


def parse_of_watched_runs(words: Sequence[str]) -> int:
    """Parse such a command, and return its status."""
    if words[0] in STARTING:
        return int(not STARTING[words[0]]().parse_args(words[1:]).command)
    return int(not REPEATING[words[0]]().parse(without_dots(words[1:])))


def run_command(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command of a console block and return its exit status, with registered experiments made small.

    The original command is parsed first, because the options that make a run small would hide an invalid value.
    """
    program, *words = shlex.split(command)
    after = words[words.index("run") + 1 :] if "run" in (words if program == "torchrun" else words[:2]) else []
    if after and after[0] in ExperimentRegistry.names():
        if program == "loopscope" and "--help" not in after:
            options = parse_run(ExperimentRegistry.get(after[0]), after[1:])
            config_of(ExperimentRegistry.get(after[0]), options), run_options(options)
        words += SMALL[after[0]].split()
    if program == "loopscope" and is_of_watched_runs(words):  # tests/framework/observing runs them
        return parse_of_watched_runs(words)
    if program == "loopscope":
        return status_of(lambda: main(words))
    if program == "python" and words[:2] == ["-m", "pytest"]:
        return run_pytest(*words[2:])
    if program == "python" and words[0].endswith(".py"):
        monkeypatch.setattr(sys, "argv", words)
        with restored_registries():
            return status_of(lambda: runpy.run_path(words[0], run_name="__main__"))
    if program == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return subprocess.run([*launcher, *words], check=False).returncode
    if program == "make":
        return status_of(lambda: run_recipe(words[0], monkeypatch))
    if program == "source":
        return 0 if words == [f"{variables()['VENV']}/bin/activate"] else 1
    raise AssertionError(f"No page shows commands of {program}: {command}")


def run_pytest(*words: str) -> int:
    """Run pytest on files of the current folder, in this process, because another would import torch again."""
    modules_before = {*sys.modules}
    settings = ["-q", "-p", "no:cacheprovider", "--rootdir", ".", "-c", str(ROOT / "pyproject.toml")]
    with restored_registries():
        status = pytest.main([*settings, *words])
    for name in {*sys.modules} - modules_before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(Path.cwd())):
            del sys.modules[name]
    return int(status)


def run_recipe(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the loopscope commands of a Makefile target, which may contain no other commands."""
    lines = [line for line in recipes()[target] if not line.startswith("test -x")]
    for line in lines if f"make {target}" not in PARSED else ():
        assert "/loopscope " in line, line
        assert run_command("loopscope " + line.split("/loopscope ")[1], monkeypatch) == 0


def variables() -> dict[str, str]:
    """Return the variables of the Makefile."""
    return dict(re.findall(r"^(\w+) := (\S+)$", (ROOT / "Makefile").read_text(), re.M))


def recipes() -> dict[str, list[str]]:
    """Return the command lines of every target of the Makefile."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    rules = re.findall(r"^([\w.$()-]+):[^=\n]*\n((?:\t.*\n)*)", text, re.M)
    return {target: [line.strip() for line in lines.splitlines()] for target, lines in rules}


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every block of a page, in order, in ``folder``."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("WANDB_MODE", "offline")
    namespace: dict[str, Any] = {"__name__": page.stem}
    with restored_registries():
        for block in blocks(page):
            run_block(block, namespace, monkeypatch)


def run_block(block: Block, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, save or parse one block."""
    if block.file:
        with Path(block.file).open("a", encoding="utf-8") as file:
            file.write(block.text)
    elif block.shown:
        assert Path(block.shown).read_text(encoding="utf-8") == block.text, block.shown  # a command has written it
    elif block.language == "python":
        exec(compile(block.text, "a block of the page", "exec"), namespace)
    if block.language == "yaml":
        yaml.safe_load(block.text)
    if block.language == "toml":
        tomllib.loads(block.text)
    for command in block.commands() if block.language == "console" else ():
        assert run_command(command, monkeypatch) == 0, command
