"""Common mistakes in hooks: each is reported in one line with the source line or the remedy, and changes nothing.

Every case is a separate file, run by the command like a script.
"""

# ruff: noqa: E501 - one row per kind of mistake

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from textwrap import dedent, indent

import pytest
from loopscope import training_hooks
from loopscope.cli import main, without_traceback
from loopscope.hooks import HookRegistry

from tests.framework.runs.small_experiment import Small, contents, read_json, registered
from tests.support.cases import slow_unless

assert training_hooks.__all__
HEAD = """\
import sys
import numpy as np
import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, StatePart, StepSchedule, TrainingHook, UsageError
from loopscope.hooks import GradientTap, MetricInfo


"""
NUMBER = count()
OBSERVER = """
name = "spread"
hook_points = {HookPoint.POST_STEP}
metrics = "std | standard deviation of the logits | [0, ∞) | Grows with confidence."
"""


@dataclass(frozen=True)
class Broken:
    """A broken hook: the body of its class, which follows the usual declarations, and the expected message."""

    name: str
    body: str
    answer: str
    refused: bool = False
    """Whether the hook is refused before the run, with status 2; other hooks raise in the run."""
    base: str = "TrainingHook"
    fine: bool = False
    """Whether the run continues with the hook and reports at most a note."""
    options: tuple[str, ...] = ()
    decorator: str = "@HookRegistry.register\n"

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def text(self) -> str:
        body = indent(OBSERVER + dedent(self.body), "    ")
        return f"{HEAD}{self.decorator}class Spread({self.base}):\n    '''A hook.'''\n{body}"


COMPUTE = """
def compute(self, ctx):
    return {"std": 1.0}
"""


def compute(code: str, before: str = "") -> str:
    return f"{before}\ndef compute(self, ctx):\n{indent(dedent(code).strip(), '    ')}\n"


HERE = r"\[broken\d+\.py:\d+ in "
RAISES = HERE + r"compute: "
IN_COMPUTE = HERE + r"compute\]"
RUNS = [
    Broken("misspelt attribute", compute("return {'std': ctx.batch_dta[0].std()}"), r"no attribute 'batch_dta' \[broken\d+\.py:17 in compute: return {'std': ctx\.batch_dta\[0\]\.std\(\)}\]\. Did you mean 'batch_data'\?"),
    Broken("field of another point", compute("return {'std': ctx.batch_data[0].std()}", "hook_points = {HookPoint.POST_EPOCH}"), "batch_data is not set at POST_EPOCH; it is set at PRE_STEP, POST_BACKWARD, PRE_UPDATE, POST_STEP"),
    Broken("field that was not requested", compute("return {'std': sum(grad.norm() for grad in ctx.accumulated_grads.values())}", "hook_points = {HookPoint.POST_EPOCH}"), "accumulated_grads is not set; set needs_grads = True in class Spread"),
    Broken("field before its time", compute("return {'std': ctx.prev_step_grads['0.weight'].norm()}", "needs_prev_step_grads = True"), "prev_step_grads is not set here; it is set from the second step on"),
    Broken("missing evaluation", compute("return {'std': ctx.evaluation['val_acc']}"), r"KeyError: 'val_acc' \[.*evaluation is not set at POST_STEP; it is set at PRE_EPOCH, POST_EPOCH, SNAPSHOT"),
    Broken("field without a number", compute("return {'std': ctx.val_acc}"), "returned a NoneType as a metric; .*; its name is 'std'"),
    Broken("field in a called function", "def of(self, ctx):\n    return ctx.prev_step_grads['0.weight']\n" + compute("return {'std': self.of(ctx).norm()}"), "in compute: return .*; broken.* in of: return .*set needs_prev_step_grads = True in class Spread"),
    Broken("returns None", compute("ctx.loss.mean()"), r"returned None; a hook returns a dict of metrics, {} if it has none " + IN_COMPUTE),
    Broken("returns a number", compute("return ctx.loss"), "returned a Tensor; a hook returns a dict of metrics"),
    Broken("returns a list", compute("return [('std', 1.0)]"), "returned a list; a hook returns a dict of metrics.* " + IN_COMPUTE),
    Broken("returns a generator", compute("return (value for value in [1.0])"), "returned a generator; a hook returns a dict"),
    Broken("metric name that is an integer", compute("return {1: 2.0}"), "returned a metric under the name 1; names of metrics are strings " + IN_COMPUTE),
    Broken("several numbers", compute("return {'std': ctx.batch_data[0].std(0)}"), r"returned a tensor of shape \(4,\) as 'std'; .*return its mean or norm, or \.tolist\(\) " + IN_COMPUTE),
    Broken("several numbers of NumPy", compute("return {'std': np.zeros(3)}"), r"returned an array of shape \(3,\) as 'std'"),
    Broken("text as a value", compute("return {'std': 'high'}"), "returned a str as a metric; a metric is a float.*; its name is 'std'"),
    Broken("complex number", compute("return {'std': torch.tensor(1j)}"), "returned a tensor of torch.complex64 on cpu as a metric"),
    Broken("tensor without numbers", compute("return {'std': torch.zeros((), device='meta')}"), "returned a tensor of torch.float32 on meta as a metric"),
    Broken("odd key within a metric", compute("return {'std': {(1, 2): 1.0}}"), r"the key \(1, 2\) as a metric; such keys are strings or numbers"),
    Broken("backward in an observer", compute("ctx.loss.backward()\nreturn {}"), "Hooks run without gradients: call ctx.compute_batch_gradients"),
    Broken("writes to its view", compute("ctx.loss = 3.0\nreturn {}"), "cannot assign to field 'loss'"),
    Broken("no text", compute("raise ValueError"), r"raised at POST_STEP of step 1: ValueError " + RAISES + r"raise ValueError\]"),
    Broken("text of many lines", compute("raise ValueError('one\\n\\n  two\\x1b[31m')"), r"ValueError: one two.* " + RAISES),
    Broken("very long text", compute("raise ValueError('x' * 9999 + 'end')"), r"ValueError: x{200} \.\.\. x+end " + RAISES),
    Broken("endless recursion", "def again(self):\n    return self.again()\n" + compute("return self.again()"), r"RecursionError.*in compute: return self.again\(\); .*\d more lines; .*in again"),
    Broken("exits", compute("sys.exit(0)"), "SystemExit: 0"),
    Broken("error in a library", compute("return {'std': torch.zeros(2) @ torch.zeros(3)}"), "RuntimeError: .* " + RAISES + r"return {'std': torch\.zeros\(2\) @ torch\.zeros\(3\)}\]"),
    Broken("raises in start", "def start(self, run):\n    self.x = run.modle\n" + COMPUTE, "raised at start of step 0: .*in start: self.x = run.modle.*Did you mean 'model'"),
    Broken("raises in end", "def end(self, status):\n    1 / 0\n" + COMPUTE, r"raised at end of step 3: ZeroDivisionError: .* in end: 1 / 0\]"),
    Broken("raises in check", "def check(self, values, step):\n    values['sdt']\n" + COMPUTE, r"raised at check of step \d: KeyError: 'sdt' .* in check: values\['sdt'\]\]"),
    Broken("raises in describe_metrics", "def describe_metrics(self):\n    return [1 / 0]\n" + COMPUTE, "raised at describe_metrics of step 0: ZeroDivisionError"),
    Broken("describes by texts", "def describe_metrics(self):\n    return ['std']\n" + COMPUTE, "returned 'std'; it must return a list of MetricInfo.*in describe_metrics"),
    Broken("raises in taps", "def taps(self, model):\n    return [model.head]\n" + COMPUTE, "raised at taps of step 0: AttributeError.*in taps: return"),
    Broken("taps of the wrong type", "def taps(self, model):\n    return [model[0].weight]\n" + COMPUTE, "taps are GradientTap.*in taps"),
    Broken("raises in a tap", "def see(self, gradient):\n    gradient.nrom()\ndef taps(self, model):\n    return [GradientTap('0', 'output', self.see)]\n" + COMPUTE, "raised at tap on '0' of step 1: AttributeError.* in see: gradient.nrom"),
    Broken("raises in state_dict", "def state_dict(self):\n    return self.sums\n" + COMPUTE, "raised at state_dict of step .*in state_dict: return self.sums", options=("--save-checkpoints", "1")),
    Broken("table of the wrong type", "def table(self):\n    return [1.0]\n" + COMPUTE, r"raised at table of step 3: TypeError: returned \[1\.0\]; a table is a dict of rows.*in table"),
    Broken("table without numbers", "def table(self):\n    return {'a': {'b': 'c'}}\n" + COMPUTE, "raised at table of step 3: TypeError: returned .*; a table is a dict of rows.*in table"),
    Broken("misspelt verb", "def intervene(self, run_ctx, model_ctx):\n    model_ctx.scale_gradient(0.5)\n    return {}\n", "AttributeError: .*'scale_gradient'.*Did you mean 'scale_gradients'", base="InterventionHook"),
]  # fmt: skip
CHANGES = [
    Broken("steps in an observer", "def start(self, run):\n    self.model = run.model\n" + compute("[parameter.sub_(0.1 * parameter.grad) for parameter in self.model.parameters()]\nreturn {}"), r"may only read, but changed .*Its code is at broken\d+\.py:\d+ in compute\. ctx.evaluate\(weights\) evaluates other weights, .*model_ctx.apply_perturbation"),
    Broken("backward pass of the model", compute("with torch.enable_grad():\n    ctx.model(ctx.batch_data[0]).sum().backward()\nreturn {}"), r"changed .*in compute\. ctx.compute_batch_gradients\(batch\) and"),
    Broken("sets a gradient", compute("for parameter in ctx.model.parameters():\n    parameter.grad = None\nreturn {}"), r"changed .*in compute\. .*declare commits = {StatePart.GRADIENTS}"),
    Broken("leaves the model in eval mode", compute("ctx.model.eval()\nreturn {}"), r"changed .*in compute\. ctx.forward\(inputs, train="),
]  # fmt: skip
REFUSED = [
    Broken("forgotten decorator", COMPUTE, r"The hook 'spread' is not registered: put @HookRegistry.register above the class broken\d+.Spread \(broken\d+\.py:8\)\.", decorator=""),
    Broken("missing name", "del name\n" + COMPUTE, r"Hook class broken\d+.Spread \(broken\d+\.py:8\) needs a name"),
    Broken("positional option", "def __init__(self, size: int = 1):\n    pass\n" + COMPUTE, r"takes 'size'; an option must be keyword-only, annotated, and have a default: \(self, \*, size: int = 1\)"),
    Broken("option without a type", "def __init__(self, *, size=1):\n    pass\n" + COMPUTE, "takes 'size'; an option must be keyword-only, annotated"),
    Broken("points as texts", "hook_points = {'POST_STEP'}\n" + COMPUTE, "Unknown hook point 'POST_STEP'. Known members of HookPoint: PRE_EPOCH"),
    Broken("points as one text", "hook_points = 'post_step'\n" + COMPUTE, "has hook_points = 'post_step'; it must be a set: hook_points = {HookPoint.POST_STEP}"),
    Broken("one point", "hook_points = HookPoint.SNAPSHOT\n" + COMPUTE, r"it must be a set: hook_points = {HookPoint\.SNAPSHOT}"),
    Broken("misspelt loop", "loop_points = {'epochs': {HookPoint.POST_STEP}}\n" + COMPUTE, "has loop_points: Unknown loop 'epochs'. Did you mean 'epoch'"),
    Broken("schedule as a number", "step_schedule = 10\n" + COMPUTE, r"has step_schedule = 10; it must be a StepSchedule, such as StepSchedule\(mode='stride'"),
    Broken("schedule of another mode", "step_schedule = StepSchedule(mode='every', every_n_steps=2)\n" + COMPUTE, r"Unknown step schedule 'every'. Known: continual, stride, burst\. \[.*broken\d+\.py:15 in Spread: step_schedule = "),
    Broken("schedule of a fraction", "step_schedule = StepSchedule(mode='stride', every_n_steps=2.5)\n" + COMPUTE, "every_n_steps is 2.5; it must be an integer"),
    Broken("compute without a context", "def compute(self):\n    return {}\n", r"has a method compute \[broken\d+\.py:15 in compute\] that cannot be called; .*compute\(self, ctx\)"),
    Broken("check without a step", "def check(self, values):\n    pass\n" + COMPUTE, r"has a method check .*check\(self, values, step\)"),
    Broken("intervene without the model", "def intervene(self, ctx):\n    return {}\n", r"has a method intervene .*intervene\(self, run_ctx, model_ctx\)", base="InterventionHook"),
    Broken("exits in its constructor", "def __init__(self):\n    sys.exit(0)\n" + COMPUTE, r"Hook 'spread' cannot be created with \(\): SystemExit: 0 \[.*in __init__: sys.exit"),
    Broken("points in its constructor", "def __init__(self):\n    self.hook_points = {'POST_STEP'}\n" + COMPUTE, "Hook 'spread': Unknown hook point 'POST_STEP'"),
    Broken("schedule in its constructor", "def __init__(self):\n    self.step_schedule = 10\n" + COMPUTE, "Hook 'spread' has step_schedule = 10"),
    Broken("file in a text", "@classmethod\ndef file_names(cls, strategy):\n    return 'spread.txt'\n" + COMPUTE, r"file_names\(\) of .* returned 'spread.txt'; .*return a list of file names"),
    Broken("file names of an object", "def file_names(self, strategy):\n    return []\n" + COMPUTE, r"has a method file_names .*file_names\(strategy\)"),
    Broken("no compute", "def computes(self, ctx):\n    return {}\n", r"must define compute\(\)"),
    Broken("no description", "metrics = ''\n" + COMPUTE, r"must define describe_metrics\(\) \(or a table metrics\)"),
    Broken("description of one word", "metrics = 'std'\n" + COMPUTE, "The metric row 'std' is invalid; write 'name . formula . range . reading'"),
    Broken("commits of an observer", "commits = {StatePart.GRADIENTS}\n" + COMPUTE, "has commits, but is an observer; derive it from InterventionHook"),
    Broken("observer that intervenes", "def intervene(self, run_ctx, model_ctx):\n    return {}\n" + COMPUTE, "has intervene, but is an observer"),
    Broken("one commit", "commits = StatePart.GRADIENTS\ndef intervene(self, run_ctx, model_ctx):\n    return {}\n", "it must be a set: commits = {StatePart.GRADIENTS}", base="InterventionHook"),
    Broken("undeclared commit", "def intervene(self, run_ctx, model_ctx):\n    model_ctx.scale_gradients(0.5)\n    return {}\n", r"GRADIENTS.* \[broken\d+\.py:\d+ in intervene: model_ctx.scale_gradients\(0.5\)\]", base="InterventionHook"),
    Broken("raises in its constructor", "def __init__(self, *, size: int = 1):\n    self.rows = 1 // size\n" + COMPUTE, r"Hook 'spread' cannot be created with \(size=0\): ZeroDivisionError: .* in __init__: self.rows = 1 // size\]", options=("--hook-config", "spread.size=0")),
]  # fmt: skip
FINE = [
    Broken("numbers of NumPy", compute("return {'std': np.float32(0.5), 'std/a': {np.int64(3): np.array(2)}, 'std/b': [np.bool_(True), np.float64('nan')]}", "metrics = 'std | a | b | c\\nstd/<parameter> | a | b | c'"), ""),
    Broken("value with a graph", compute("with torch.enable_grad():\n    return {'std': ctx.model[0](ctx.batch_data[0]).std()}"), ""),
    Broken("undescribed metric", compute("return {'sdt': 1.0}"), r"Hook 'spread' returns a metric 'sdt' that it does not describe\. Did you mean 'std'\? Add a row to metrics in class Spread: sdt \| formula"),
]  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the final weights of the run without the hook."""
    folder = tmp_path_factory.mktemp("bare")
    with registered(Small):
        assert main(words(folder, "norms")) == 0
    return (folder / "small/plain/plain_final.pt").read_bytes()


def words(folder: Path, hook: str, *more: str) -> list[str]:
    options = ["--strategy", "plain", "--epochs", "1", "--output-dir", str(folder)]
    return ["run", "small", "--hooks", hook, *options, *more]


@pytest.fixture
def answer(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch) -> Iterator[Callable]:
    """Return a function that runs a broken hook's file and returns the status and the message."""
    made: list[str] = []

    def run(broken: Broken, *more: str) -> tuple[int, str]:
        path = tmp_path / f"broken{next(NUMBER)}.py"
        path.write_text(broken.text)
        made.append(path.stem)
        monkeypatch.setattr(sys, "argv", [str(path)])
        HookRegistry.unregister("spread")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        capfd.readouterr()
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            with pytest.raises(SystemExit) as end:
                without_traceback(sys.__excepthook__)(type(error), error, error.__traceback__)
            status = int(end.value.code)
        else:
            status = main(words(tmp_path / "output", "spread", *broken.options, *more))
        output, errors = capfd.readouterr()
        assert all(letter.isprintable() for letter in (output + errors).replace("\n", ""))
        warned = re.findall(r"^(?:warning|note): (.*Hook 'spread'.*\n)", output, re.MULTILINE)
        return status, errors or "".join(warned)

    with registered(Small), warnings.catch_warnings():
        warnings.simplefilter("always")
        yield run
        HookRegistry.unregister("spread")
    for name in made:
        sys.modules.pop(name)


def assert_one_line(errors: str, pattern: str) -> None:
    first = errors.splitlines()[-1] if errors else ""
    assert re.search(pattern, first), errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) == 1, errors


@pytest.mark.longer
@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("broken", [*RUNS, *CHANGES], ids=str)
def test_raising_hook_is_reported_in_one_line(broken, answer, tmp_path) -> None:
    """The line names the source line of the hook or the remedy; the traceback is only in summary.json."""
    status, errors = answer(broken)
    hook_lines = [line for line in errors.splitlines() if "checkpoint" not in line or "Hook 'spread'" in line]
    assert_one_line("\n".join(hook_lines), broken.answer)
    assert status == 1
    summary = tmp_path / "output/small/plain/summary.json"
    if summary.exists():  # a run that did not start leaves its folder unchanged
        summary_fields = read_json(summary)
        assert summary_fields["traceback"].startswith("Traceback (most recent call last)")
        assert all(error["traceback"].startswith("Traceback (most") for error in summary_fields["hook_errors"])


@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize(
    "broken", [pytest.param(case, marks=slow_unless(row % 3 == 0), id=str(case)) for row, case in enumerate(RUNS)]
)
def test_skipped_failing_hook_leaves_no_trace(broken, answer, bare, tmp_path) -> None:
    """With --on-hook-error skip, the final weights are those of the run without the hook."""
    status, errors = answer(broken, "--on-hook-error", "skip")
    assert re.search(broken.answer, errors), errors
    assert "The run continues without this hook." in errors
    assert status == 0
    assert (tmp_path / "output/small/plain/plain_final.pt").read_bytes() == bare


@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("broken", REFUSED, ids=str)
def test_unusable_hook_is_refused_before_any_output(broken, answer, tmp_path) -> None:
    """The command exits with status 2 and one line on stderr, before it creates the output folder."""
    status, errors = answer(broken)
    assert_one_line(errors, broken.answer)
    assert status == 2
    if broken.name != "undeclared commit":  # detected at the first step
        assert not contents(tmp_path).keys() & {"output"}


@pytest.mark.parametrize("broken", FINE, ids=str)
def test_unusual_values_are_accepted(broken, answer, bare, tmp_path) -> None:
    status, errors = answer(broken, "--hook-jsonl", "--hook-csv")
    assert status == 0
    if broken.answer:
        assert_one_line(errors, broken.answer)
    else:
        assert errors == ""
    assert (tmp_path / "output/small/plain/plain_final.pt").read_bytes() == bare
    assert '"spread/s' in (tmp_path / "output/small/plain/plain.jsonl").read_text()


def test_traceback_option_shows_the_whole_traceback(answer) -> None:
    """The last line of the output still has the short explanation."""
    status, errors = answer(RUNS[0], "--traceback")
    assert status == 1
    assert "Traceback (most recent call last):\n" in errors
    assert re.search(r'File ".*/broken\d+\.py", line 17, in compute\n', errors)
    assert re.search(RUNS[0].answer, errors.splitlines()[-1])
