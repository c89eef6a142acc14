"""The counts behind ``make shape``."""

import ast
import inspect
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import loopscope
import torch
from loopscope.hooks import HookPoint, Metrics, RunDataContext, TrainingHook
from torch import nn

ROOT = Path(__file__).parents[2]
FOLDERS = ("framework", "training_hooks", "sinks", "experiments")
MEASURED_STEP = 10
ROOMS = {
    "low precision": ("lowbit/",),
    "laws": ("laws/", "testing.py", "cli/check.py", "cli/check_progress.py"),
    "watched scripts": (
        *("observing/", "integrations/watch_site/", "integrations/watched_process.py", "integrations/callback.py"),
        *("integrations/waiting_optimizers.py", "integrations/observed_optimizer.py"),
        *("integrations/other_optimizers.py", "integrations/forward_arguments.py", "integrations/reported_numbers.py"),
        *("integrations/validation_records.py", "cli/watch.py", "cli/watched_run.py", "cli/training_commands.py"),
        *("doctor/step_times.py", "doctor/detectors/speed.py", "training/step_clock.py"),
    ),
    "policies": (
        *("doctor/detectors/policies.py", "doctor/detectors/policy_losses.py", "doctor/policy_numbers.py"),
        *("doctor/senses/policy_graph.py", "doctor/senses/episodes.py", "doctor/senses/divergences.py"),
        "doctor/senses/reference_sides.py",
    ),
    "comparisons of commands": ("cli/equal", "sequential_test.py", "student_t.py"),
    "budget": ("engine/budget.py", "runs/budgets.py"),
    "findings over runs": ("sweeps/fisher.py", "cli/finding_groups.py"),
    "sweeps": ("sweeps/", "cli/submitted_runs.py", "cli/job_listing.py", "cli/watch_grid.py"),
    "many runs": ("many_runs/", "seed_groups.py"),
    "page of many runs": ("report/folder_", "cli/folder_report.py"),
    "compiled models": ("taps/compiled_", "taps/scripted_modules.py", "state/compiled_code.py"),
}
"""The rooms of ``framework`` that subjects were added as, by the beginnings of their files' paths."""
_ROOM_OF = {prefix: room for room, prefixes in ROOMS.items() for prefix in prefixes}

IMPORT = """
import sys
from loopscope.hooks import HookPoint, HookRegistry, InterventionHook, MetricInfo, ModelDataContext, RunDataContext
for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] == "loopscope" and getattr(module, "__file__", None):
        print(name, module.__file__)
"""


class LossObserver(TrainingHook):
    """An observer that reports the loss after every step."""

    name = "loss_observer"
    hook_points = {HookPoint.POST_STEP}

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the loss."""
        return {"loss": ctx.loss}


def one_step() -> set[tuple[str, str]]:
    """Return the functions, by file, that ``step()`` and ``zero_grad()`` of an attached loop call in its tenth step.

    Comprehensions, which Python 3.11 runs as functions and later versions do not, are left out.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: set[tuple[str, str]] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        is_comprehension = frame.f_code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
        if event == "call" and not is_comprehension and path.is_relative_to(ROOT):
            file = path.relative_to(ROOT)
            if file.parts[0] in FOLDERS:
                calls.add((str(file), frame.f_code.co_qualname))

    with TemporaryDirectory() as folder:
        options: dict[str, Any] = {"hooks": [LossObserver()], "out": folder + "/run", "display": "none"}
        with loopscope.attach(model, optimizer, **options) as scope:
            for step, batch in enumerate(scope.batches([torch.ones(2, 4)] * (MEASURED_STEP + 2)), 1):
                scope.backward(model(batch).square().mean())
                sys.setprofile(record if step == MEASURED_STEP else None)
                optimizer.step()
                optimizer.zero_grad()
                sys.setprofile(None)
    return calls


def imported_by_hooks() -> tuple[int, list[str]]:
    """Return the lines and the names of the modules that an import from ``loopscope.hooks`` by an author loads."""
    listing = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
    modules = dict(line.split(" ", 1) for line in listing.splitlines())
    return sum(len(Path(path).read_text("utf-8").splitlines()) for path in modules.values()), [*modules]


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax trees of the four folders of source code, by path."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text("utf-8")) for path in paths}


def lambdas() -> int:
    """Return the number of lambdas in the source code."""
    return sum(isinstance(node, ast.Lambda) for tree in trees().values() for node in ast.walk(tree))


def state_exports() -> int:
    """Return the number of names that ``loopscope.state`` exports."""
    return len(loopscope.state.__all__) if inspect.ismodule(getattr(loopscope, "state", None)) else 0


def repeated_class_names() -> dict[str, int]:
    """Return the names of classes that several classes of the source code have, with their numbers."""
    classes = (node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {name: count for name, count in Counter(classes).items() if count > 1}


def import_circles() -> list[list[str]]:
    """Return the circles of files that import each other, imports for types included; interfaces are left out."""
    below: dict[str, set[str]] = {}
    modules = {_dotted(path): str(path.relative_to(ROOT)) for path in trees()}
    for path, tree in trees().items():
        file = modules[_dotted(path)]
        imported = {modules[name] for node in ast.walk(tree) for name in _imported(node, path) if name in modules}
        below[file] = {other for other in imported if other != file and not other.endswith("__init__.py")}
    return [sorted(circle) for circle in _strongly_connected(below) if len(circle) > 1]


def _dotted(path: Path) -> str:
    """Return the name under which a file is imported."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    inner = [part for part in (folder, *rest) if part not in ("framework", "__init__")]
    return ".".join(["loopscope", *inner])


def _imported(node: ast.AST, path: Path) -> Iterator[str]:
    """Yield the dotted names that an import may load."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = _dotted(path).split(".")
        above = package[: len(package) - node.level + (path.name == "__init__.py")] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield module
        yield from (f"{module}.{alias.name}" for alias in node.names)


def _strongly_connected(below: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Yield the sets of nodes that reach each other, by reachability of each node."""

    def reached(start: str) -> set[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            following = below.get(waiting.pop(), set()) - seen
            seen |= following
            waiting += following
        return seen

    reach = {node: reached(node) for node in below}
    done = set[str]()
    for node in below:
        if node not in done:
            circle = {other for other in reach[node] if node in reach.get(other, ())} | {node}
            done |= circle
            yield circle


def code_lines() -> Counter[str]:
    """Return the lines of code in each room of ROOMS, and in ``the rest``: no docstrings, comments and blank lines."""
    lines = Counter[str]()
    used = set[str]()
    for path, tree in trees().items():
        folder, *rest = path.relative_to(ROOT).parts
        if folder == "framework":
            file = "/".join(rest)
            prefix = next((item for item in _ROOM_OF if file.startswith(item)), "")
            used.add(prefix)
            lines[_ROOM_OF.get(prefix, "the rest")] += _code_lines(path, tree)
    if unused := _ROOM_OF.keys() - used:
        raise ValueError(f"{', '.join(sorted(unused))} in ROOMS of tests/shape/counts.py names no file of framework/.")
    return lines


def _code_lines(path: Path, tree: ast.Module) -> int:
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in skipped and token.type != tokenize.ENCODING:
                lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - texts)
