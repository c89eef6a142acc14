"""The counts behind ``make shape``."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
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
SHORT = 2  # lines of a function's body, without its docstring

IMPORT = """
import sys
import loopscope.hooks
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
    """Return the number of lines and the names of the modules that ``import loopscope.hooks`` loads."""
    listing = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
    modules = dict(line.split(" ", 1) for line in listing.splitlines())
    return sum(len(Path(path).read_text("utf-8").splitlines()) for path in modules.values()), [*modules]


def trees() -> Iterator[ast.Module]:
    """Yield the syntax trees of the four folders of source code."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ast.parse(path.read_text("utf-8"))


def lambdas() -> int:
    """Return the number of lambdas in the source code."""
    return sum(isinstance(node, ast.Lambda) for tree in trees() for node in ast.walk(tree))


def short_functions() -> float:
    """Return the percentage of functions whose body has at most two lines, without the docstring."""
    functions = [
        node for tree in trees() for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return 100 * sum(_lines_of_body(function) <= SHORT for function in functions) / len(functions)


def _lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def state_exports() -> int:
    """Return the number of names that ``loopscope.state`` exports."""
    return len(loopscope.state.__all__) if inspect.ismodule(getattr(loopscope, "state", None)) else 0
