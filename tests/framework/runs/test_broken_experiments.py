"""Mistakes in experiments: each is reported in one line with file and remedy, with status 2, and nothing is written."""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main, without_traceback
from loopscope.errors import InvalidExperimentError
from loopscope.hooks import ExperimentRegistry
from loopscope.runs import ExperimentRunner

from tests.docs.markdown import ROOT, blocks
from tests.framework.runs.small_experiment import Small, SmallConfig, contents, read_json, registered, session

FILLED = (experiments, sinks, training_hooks)
GOOD = '''"""An experiment that works."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from loopscope import (
    ExperimentConfig, ExperimentRegistry, ExperimentRunner, GrokkingRunner, Loader, TensorLoader, fixed_order
)
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader


@dataclass(frozen=True, kw_only=True)
class BrokenConfig(ExperimentConfig):
    """Options of broken."""

    epochs: int = 2
    width: int = 3
    rates: list[float] = field(default_factory=list)


@ExperimentRegistry.register
class Broken(ExperimentRunner[BrokenConfig]):
    """An experiment that a test breaks."""

    name = "broken"
    config_class = BrokenConfig
    strategies = ("plain", "other-order")
    presets = {"tiny": {"epochs": 1}}
    loop = "epoch"
    live_metrics = {"loss": ["training_metrics/loss"]}

    @property
    def length(self):
        return self.config.epochs

    def build_model(self):
        return nn.Sequential(nn.Linear(2, self.config.width), nn.Linear(self.config.width, 1))

    def build_loader(self, strategy):
        return TensorLoader((torch.ones(4, 2), torch.zeros(4, 1)), 2, fixed_order(torch.arange(4)))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def compute_loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model):
        return {"val_loss": 0.5, "numpy": np.float32(0.5), "tensor": torch.tensor(2.0)}
'''
REGISTER = "@ExperimentRegistry.register\n"
DATACLASS = "@dataclass(frozen=True, kw_only=True)\n"
NAME = '    name = "broken"\n'
CONFIG = "    config_class = BrokenConfig\n"
STRATEGIES = '("plain", "other-order")'
OPTION = "    width: int = 3\n"
PRESET = '{"tiny": {"epochs": 1}}'
LIVE = '{"loss": ["training_metrics/loss"]}'
LENGTH = "        return self.config.epochs\n"
MODEL = "return nn.Sequential(nn.Linear(2, self.config.width), nn.Linear(self.config.width, 1))"
LOADER = "return TensorLoader((torch.ones(4, 2), torch.zeros(4, 1)), 2, fixed_order(torch.arange(4)))"
OPTIMIZER = "return torch.optim.SGD(model.parameters(), lr=0.1)"
LOSS = "return nn.functional.mse_loss(model(batch[0]), batch[1])"
EVALUATION = 'return {"val_loss": 0.5, "numpy": np.float32(0.5), "tensor": torch.tensor(2.0)}'
ABSTRACT = GOOD[GOOD.index("    def build_model") : GOOD.index("    def evaluate")]


def method(text: str) -> str:
    """Return a change that appends a method, or other text, to the class."""
    return f"{EVALUATION}\n\n{text.rstrip()}"


CASES: dict[str, tuple[str, str, list[str]]] = {
    # The class
    "no name": (NAME, "", ["needs a name", "name = 'my_experiment'"]),
    "a number as a name": (NAME, "    name = 3\n", ["it has 3", "letters, digits and underscores"]),
    "a name with a space": (NAME, '    name = "two words"\n', ["'two words'", "underscores"]),
    "a name with a dash": (NAME, '    name = "two-words"\n', ["it has 'two-words'"]),
    "a taken name": (NAME, '    name = "mod_arithmetic"\n', ["Two experiments", "ModArithmeticRunner", "rename one"]),
    "no strategies": (f"    strategies = {STRATEGIES}\n", "", ["strategies = None", "a list", "('one', 'two')"]),
    "strategies as one text": (STRATEGIES, '"plain"', ["strategies = 'plain'", "('one', 'two')"]),
    "a set of strategies": (STRATEGIES, '{"plain", "other"}', ["strategies = {", "a list"]),
    "numbers as strategies": (STRATEGIES, "(1, 2)", ["strategies = (1, 2)", "each item text"]),
    "a strategy with a slash": (STRATEGIES, '("a/b",)', ["'a/b'", "folder"]),
    "a strategy that leads up": (STRATEGIES, '("..",)', ["'..'", "folder"]),
    "a strategy called all": (STRATEGIES, '("all",)', ["'all'", "the command line"]),
    "a strategy that is empty": (STRATEGIES, '("",)', ["strategy ''"]),
    "another __init__": (
        EVALUATION,
        method("    def __init__(self, width=3):\n        self.width = width\n"),
        ["__init__(self, width)", "def __init__(self, config, device)", "config_class"],
    ),
    "an __init__ that does not call its base": (
        EVALUATION,
        method("    def __init__(self, config, device=None):\n        self.width = config.width\n"),
        ["super().__init__(config, device)"],
    ),
    "abstract methods": (
        ABSTRACT,
        "",
        ["must define build_loader(self, strategy), build_model(self), build_optimizer(self, model), compute_loss("],
    ),
    "a method with another signature": (
        "evaluate(self, model)",
        "evaluate(self)",
        ["evaluate(self)", "def evaluate(self, model)"],
    ),
    "a method without self": ("def build_model(self)", "def build_model()", ["build_model()", "def build_model(self)"]),
    "a method with more arguments": (
        "(self, model, batch)",
        "(self, model, batch, epoch)",
        ["epoch", "(self, model, batch)"],
    ),
    "length as a method": ("    @property\n", "", ["has length = <bound method", "a number of epochs"]),
    "a misspelt loop": (
        'loop = "epoch"',
        'loop = "epochs"',
        ["loop = 'epochs'", "epoch or step", "Did you mean 'epoch'"],
    ),
    "a misspelt interval": ('loop = "epoch"', 'scheduler_interval = "steps"', ["'steps'", "Did you mean 'step'"]),
    "metrics as one text": (LIVE, '"training_metrics/loss"', ["live_metrics = 'training_metrics/loss'", "{'loss': ["]),
    "metrics without a list": (
        LIVE,
        '{"loss": "training_metrics/loss"}',
        ["live_metrics", "['training_metrics/loss']"],
    ),
    "hooks as one text": (EVALUATION, method('    minimal_hooks = "norms"\n'), ["minimal_hooks = 'norms'", "('one',"]),
    "no experiment": ("class Broken(ExperimentRunner[BrokenConfig])", "class Broken", ["ExperimentRunner"]),
    # Its options
    "no config class": (
        CONFIG,
        "",
        ["config_class", "@dataclass(frozen=True, kw_only=True)", "MyConfig(ExperimentConfig)"],
    ),
    "a config class that is no config": (CONFIG, "    config_class = dict\n", ["'dict'", "MyConfig(ExperimentConfig)"]),
    "a config instead of its class": (
        CONFIG,
        "    config_class = BrokenConfig()\n",
        ["BrokenConfig(", "a class of options"],
    ),
    "a config without @dataclass": (DATACLASS, "", ["BrokenConfig", DATACLASS.strip()]),
    "an option without a type": (OPTION, "    width = 3\n", ["width = 3", "without a type", "width: TYPE = 3"]),
    "a default without a type": (OPTION, f"{OPTION}    seed = 3\n", ["seed = 3", "seed: TYPE = 3"]),
    "an option of a type that no line can give": (
        OPTION,
        f"{OPTION}    act: nn.Module = None\n",
        ["'act'", "Module", "Literal"],
    ),
    "an option of a class that is not there": (OPTION, f'{OPTION}    act: "Nowhere" = 3\n', ["'Nowhere'", "import"]),
    "an option that is a run's": (OPTION, f"{OPTION}    overwrite: bool = True\n", ["'overwrite'", "rename"]),
    "an option that is a sink's": (
        OPTION,
        f"{OPTION}    hook_csv: bool = True\n",
        ["loopscope run broken already has an option --hook-csv", "rename"],
    ),
    "an option that is a command's": (OPTION, f"{OPTION}    strategy: str = 'x'\n", ["strategy", "rename"]),
    "an option that is a method": (OPTION, f"{OPTION}    above: float = 0.0\n", ["'above'", "rename"]),
    "a preset with an unknown option": (
        PRESET,
        '{"tiny": {"epoch": 1}}',
        ["'epoch'", "'tiny'", "Did you mean 'epochs'"],
    ),
    "a preset with a bad value": (PRESET, '{"tiny": {"epochs": "1"}}', ["epochs to '1'", "'tiny'", "an integer"]),
    "presets as a list": (PRESET, '["tiny"]', ["presets = ['tiny']", "{'quick':"]),
    # Its references
    "a misspelt hook": (
        LIVE,
        '{"loss": ["training_metric/loss"]}',
        ["'training_metric'", "Did you mean 'training_metrics'"],
    ),
    "a misspelt metric": (LIVE, '{"loss": ["training_metrics/losss"]}', ["losss", "Did you mean 'loss'"]),
    "a comparison with no strategy": (
        EVALUATION,
        method('    compared_to = {"val_loss": "plane"}\n'),
        ["'plane'", "Did you mean 'plain'"],
    ),
    "a best metric that is not evaluated": (
        EVALUATION,
        method('    best_metric = "val_los"\n'),
        ["'val_los', which best_metric", "Did you mean 'val_loss'"],
    ),
    "a strategy's hook that does not exist": (
        EVALUATION,
        method('    def strategy_hooks(self, strategy):\n        return {"norm": {}}\n'),
        ["'norm'", "Did you mean 'norms'"],
    ),
    "an option of a strategy's hook that does not exist": (
        EVALUATION,
        method('    def strategy_hooks(self, strategy):\n        return {"grad_clip": {"max_nrm": 1.0}}\n'),
        ["'max_nrm'", "Did you mean 'max_norm'"],
    ),
    "strategy hooks as a list": (
        EVALUATION,
        method('    def strategy_hooks(self, strategy):\n        return ["norms"]\n'),
        ["['norms']", "{'grad_clip': {'max_norm': 1.0}}"],
    ),
    "a default group that does not exist": (
        EVALUATION,
        method('    default_group = "minimum"\n'),
        ["'minimum'", "'minimal'"],
    ),
    # Its objects
    "a length that is no integer": (LENGTH, "        return 2.0\n", ["length = 2.0", "an int of at least 1"]),
    "a length of nothing": (LENGTH, "        return 0\n", ["length = 0", "at least 1"]),
    "a model of nothing": (MODEL, "return None", ["build_model()", "returned None", "an nn.Module"]),
    "a model that is a class": (MODEL, "return nn.Linear", ["torch.nn.modules.linear.Linear'>", "nn.Module"]),
    "a model that is a list": (MODEL, "return [nn.Linear(2, 1)]", ["[Linear(", "nn.Module"]),
    "a model without parameters": (MODEL, "return nn.ReLU()", ["ReLU", "parameters to train"]),
    "a prepared model of nothing": (
        EVALUATION,
        method("    def prepare_model(self, model, strategy):\n        model.eval()\n"),
        ["prepare_model()", "returned None"],
    ),
    "a DataLoader": (
        LOADER,
        "return DataLoader([1, 2])",
        ["DataLoader object", "TorchLoader(dataloader, self.config.seed)"],
    ),
    "a list of batches": (
        LOADER,
        "return [torch.ones(2, 2)]",
        ["[tensor(", "TensorLoader(tensors, batch_size, order)"],
    ),
    "a loader without batches": (
        LOADER,
        """
        class Empty(TensorLoader):
            def __len__(self):
                return 0
        return Empty((torch.ones(4, 2),), 2, fixed_order(torch.arange(4)))""",
        ["Empty", "batches"],
    ),
    "an optimizer of nothing": (OPTIMIZER, "torch.optim.SGD(model.parameters())", ["returned None", "an optimizer"]),
    "an optimizer that is a class": (OPTIMIZER, "return torch.optim.SGD", ["sgd.SGD'>", "(model.parameters())"]),
    "an optimizer of another model": (
        OPTIMIZER,
        "return torch.optim.SGD(self.build_model().parameters())",
        ["SGD", "model.parameters()"],
    ),
    "a scheduler that is a class": (
        EVALUATION,
        method("    def build_scheduler(self, optimizer):\n        return StepLR\n"),
        ["StepLR'>", "a scheduler"],
    ),
    "a scheduler that is a function": (
        EVALUATION,
        method("    def build_scheduler(self, optimizer):\n        return lambda step: 0.1\n"),
        ["<function", "a scheduler"],
    ),
    "a scheduler of another optimizer": (
        EVALUATION,
        method(
            "    def build_scheduler(self, optimizer):\n"
            "        return StepLR(torch.optim.SGD(self.build_model().parameters()), 1)\n"
        ),
        ["StepLR", "a scheduler of the optimizer"],
    ),
    # Its numbers
    "a loss that is a float": (LOSS, f"{LOSS}.item()", ["returned 0.", "without .item()"]),
    "a loss of nothing": (LOSS, LOSS.removeprefix("return "), ["returned None", "the loss"]),
    "a loss for each row": (LOSS, "return (model(batch[0]) - batch[1]).squeeze()", ["tensor([", "mean()"]),
    "a loss with more": (LOSS, LOSS.replace("return ", "return 0, "), ["returned (0,", "the loss alone"]),
    "a loss without a graph": (LOSS, f"{LOSS}.detach()", ["returned tensor(", "detach()"]),
    "an evaluation of nothing": (EVALUATION, "{}", ["evaluate()", "returned None", "a dict"]),
    "an evaluation that is a float": (EVALUATION, "return 0.5", ["returned 0.5", "{'val_loss': 0.5}"]),
    "an evaluation by number": (EVALUATION, "return {1: 0.5}", ["{1: 0.5}", "each name, a text"]),
    "an evaluation of a vector": (
        EVALUATION,
        'return {"val_loss": torch.ones(2)}',
        ["val_loss", "one number for each name"],
    ),
    "an evaluation of a text": (EVALUATION, 'return {"val_loss": "low"}', ["'low'", "one number for each name"]),
    "an evaluation without the scheduler's number": (
        EVALUATION,
        method(
            '    best_metric = "acc"\n\n    def build_scheduler(self, optimizer):\n'
            "        return ReduceLROnPlateau(optimizer)\n"
        ),
        ["'acc'", "best_metric"],
    ),
    "a decision of nothing": (
        EVALUATION,
        method('    def should_stop(self, evaluation):\n        evaluation["val_loss"] < 0.1\n'),
        ["should_stop()", "returned None", "True or False"],
    ),
    # Further mistakes
    "strategies as a property": (
        f"    strategies = {STRATEGIES}\n",
        "    @property\n    def strategies(self):\n        return ('plain',)\n",
        ["strategies = <property", "a list"],
    ),
    "a preset with a number as a name": (
        PRESET,
        '{1: {"epochs": 1}}',
        ["presets = {1: ", "{'quick': {'batch_size': 8}}"],
    ),
    "a preset without options": (
        PRESET,
        '{"tiny": None}',
        ["presets = {'tiny': None}", "{'quick': {'batch_size': 8}}"],
    ),
    "a strategy with a comma": (STRATEGIES, '("a,b",)', ["'a,b'", "the command line"]),
    "a strategy with a line break": (STRATEGIES, '("a\\nb",)', ["'a\\nb'", "the command line"]),
    "an __init__ without a device": (
        EVALUATION,
        method("    def __init__(self, config):\n        super().__init__(config)\n"),
        ["__init__(self, config)", "def __init__(self, config, device)"],
    ),
    "an __init__ with both the other way round": (
        EVALUATION,
        method("    def __init__(self, device, config=None):\n        super().__init__(config, device)\n"),
        ["no config after its creation", "super().__init__(config, device)"],
    ),
    "a method as a property": (
        EVALUATION,
        method("    @property\n    def build_scheduler(self):\n        return None\n"),
        ["build_scheduler (a property)", "def build_scheduler(self, optimizer)"],
    ),
    "an option that is the help": (OPTION, f"{OPTION}    help: int = 1\n", ["already has an option --help", "'help'"]),
    "an option of an unsupported type": (
        OPTION,
        f"{OPTION}    size: torch.Size = torch.Size([1])\n",
        ["'size'", "of type Size", "lists and dicts"],
    ),
    "an option that is a tuple": (
        OPTION,
        f"{OPTION}    sizes: tuple[int, ...] = (1, 2)\n",
        ["'sizes'", "tuple[int, ...]", "lists and dicts"],
    ),
    "a number for a strategy's hook": (
        EVALUATION,
        method("    def strategy_hooks(self, strategy):\n        return {1: {}}\n"),
        ["returned {1: {}}", "a dict of options by hook"],
    ),
    "a stream without a length": (
        LOADER,
        """
        from loopscope.data import TorchLoader
        from torch.utils.data import IterableDataset

        class Stream(IterableDataset):
            def __iter__(self):
                return iter(())
        return TorchLoader(DataLoader(Stream()), 0)""",
        ["TorchLoader", "len() of at least 1"],
    ),
    "a loader that yields nothing": (
        LOADER,
        """
        class Empty(TensorLoader):
            def batches(self, epoch, start=0):
                return iter(())
        return Empty((torch.ones(4, 2), torch.zeros(4, 1)), 2, fixed_order(torch.arange(4)))""",
        ["Empty yielded 0 batches in epoch 0", "its length is 2"],
    ),
    "a loader that yields less than it says": (
        LOADER,
        """
        class Short(TensorLoader):
            def __len__(self):
                return 3
        return Short((torch.ones(4, 2), torch.zeros(4, 1)), 2, fixed_order(torch.arange(4)))""",
        ["Short yielded 2 batches in epoch 0", "its length is 3"],
    ),
    "an order that is a list": (
        LOADER,
        LOADER.replace("fixed_order(torch.arange(4))", "[0, 1]"),
        ["The order is a list", "fixed_order(permutation)"],
    ),
    "an order of fewer rows": (
        LOADER,
        LOADER.replace("arange(4)", "arange(3)"),
        ["has 3 rows", "a permutation of all"],
    ),
    "a loss that is complex": (LOSS, LOSS.replace("return ", "return 1j * "), ["0.", "j", "one real number"]),
    "an evaluation of None": (
        EVALUATION,
        'return {"val_loss": None}',
        ["{'val_loss': None}", "one number for each name"],
    ),
    "a decision that is a text": (
        EVALUATION,
        method("    def should_stop(self, evaluation):\n        return 'no'\n"),
        ["should_stop()", "returned 'no'", "True or False"],
    ),
    # Missing names
    "no decorator": (REGISTER, "", ["@ExperimentRegistry.register", "broken_module.py:"]),
}


def told(text: str, folder: Path, monkeypatch: Any, capfd: Any) -> str:
    """Save an experiment as a module, run it, check the status and the files, and return the error line."""
    (folder / "broken_module.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "broken_module", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = contents(folder)
    words = ["run", "broken", "--hook-jsonl", "--hook-csv", "--no-console-output"]
    try:
        status = main(words, packages=["broken_module"])
    finally:
        for name in ("broken", "two words"):
            ExperimentRegistry.unregister(name)
    output, errors = capfd.readouterr()
    assert (status, output, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith("loopscope: ")
    assert "Traceback" not in errors
    assert contents(folder) == before
    return errors


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("case", CASES)
def test_broken_experiment_is_refused_and_writes_nothing(case, tmp_path, monkeypatch, capfd) -> None:
    """The command prints one line with the mistake and its remedy, exits with status 2 and changes no file."""
    before, after, fragments = CASES[case]
    assert before in GOOD
    sentence = told(GOOD.replace(before, after, 1), tmp_path, monkeypatch, capfd)
    assert all(fragment in sentence for fragment in fragments), sentence


def mismatch() -> str:
    """Return torch's message for 512 points of two numbers in a layer for three, since its words vary by version."""
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(3, 32)(torch.ones(512, 2))
    return str(caught.value)


SPIRALS = {
    (
        "nn.Linear(2, 32)",
        "nn.Linear(3, 32)",
    ): f"evaluate() of experiment 'broken' (broken_module.py:31) raised RuntimeError: {mismatch()}.\n",
    ("nn.Linear(32, 2))", "nn.Linear(32, 1))"): "raised IndexError: Target 1 is out of bounds.\n",
    (
        '("train", "val")',
        '("train", "test")',
    ): "should_stop() of experiment 'broken' (broken_module.py:31) raised KeyError: 'val_acc'",
    ("TensorLoader((points, labels),", "TensorLoader((points,),"): "compute_loss() of experiment 'broken' (broken",
}
"""Mistakes in the documentation's example that raise only in code of the framework, with parts of their messages."""


@pytest.mark.parametrize("case", SPIRALS, ids=lambda case: case[1])
def test_base_class_errors_name_the_experiment(case, tmp_path, monkeypatch, capfd) -> None:
    """Errors that occur in methods of the base class are reported in one line as errors of the experiment."""
    (text,) = [block.text for block in blocks(ROOT / "docs/writing-an-experiment.md") if block.file]
    assert case[0] in text
    text = text.replace('name = "spirals"', 'name = "broken"').replace("epochs: int = 60", "epochs: int = 1")
    assert SPIRALS[case] in told(text.replace(*case), tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize("loop", ["epoch", "step"])
@pytest.mark.parametrize("case", ["a loss that is a float", "a loader that yields nothing", "an evaluation of None"])
def test_late_mistakes_leave_no_files(case, loop, tmp_path, monkeypatch, capfd) -> None:
    """Mistakes that show only after training has started are refused in the same way, in both loops."""
    before, after, fragments = CASES[case]
    text = GOOD.replace('loop = "epoch"', f'loop = "{loop}"').replace(before, after, 1)
    sentence = told(text, tmp_path, monkeypatch, capfd)
    assert all(fragment in sentence for fragment in fragments), sentence


@pytest.mark.parametrize("method", ["build_model", "build_loader", "build_optimizer", "strategy_hooks"])
def test_broken_run_keeps_earlier_run(method: str, tmp_path: Path, monkeypatch) -> None:
    """A build method that returns None raises an error, and overwrite=True does not touch the earlier files."""
    session(tmp_path, strategies=["plain"]).run()
    before = contents(tmp_path)
    monkeypatch.setattr(Small, method, lambda self, *arguments: None)
    with pytest.raises(
        InvalidExperimentError, match=rf"{method}\(\) of experiment 'small' .*returned None; it must be "
    ):
        session(tmp_path, strategies=["plain"], overwrite=True).run()
    assert contents(tmp_path) == before


def test_failing_loss_keeps_completed_epochs(tmp_path: Path) -> None:
    """The run raises InvalidExperimentError in its second epoch, and the summary has status failed and one epoch."""
    losses: list[Any] = []

    class Tiring(Small):
        name = "tiring"

        def compute_loss(self, model: Any, batch: Any) -> Any:
            losses.append(super().compute_loss(model, batch))
            return losses[-1] if len(losses) <= 4 else None

    with pytest.raises(InvalidExperimentError, match="returned None"):
        session(tmp_path, Tiring, strategies=["plain"]).run()
    summary = read_json(tmp_path / "tiring/plain/summary.json")
    assert (summary["status"], summary["epochs"]) == ("failed", 1)


def test_numbers_of_any_kind_become_plain_ones(tmp_path: Path, monkeypatch) -> None:
    numbers = {"a": np.float32(0.5), "b": torch.tensor(2), "c": np.array(1.5), "d": True}
    monkeypatch.setattr(Small, "evaluate", lambda self, model: numbers)
    monkeypatch.setattr(Small, "should_stop", lambda self, evaluation: torch.tensor(evaluation["b"] == 2))
    (summary,) = session(tmp_path, strategies=["plain"], epochs=3).run()
    assert summary["final"] == {"a": 0.5, "b": 2, "c": 1.5, "d": True}
    assert {type(value) for value in summary["final"].values()} == {float, int, bool}
    assert summary["target_reached"] == {"epoch": 0, "step": 3}


@pytest.mark.longer
def test_nameless_base_is_refused_and_subclass_runs(tmp_path: Path) -> None:
    """Registering a base class without a name raises an error; its subclass with a name can be trained."""

    class Base(ExperimentRunner[SmallConfig]):
        loop = "epoch"
        build_model, build_loader, build_optimizer = Small.build_model, Small.build_loader, Small.build_optimizer
        compute_loss, data = Small.compute_loss, Small.data

        @property
        def length(self) -> int:
            return 1

    class Leaf(Base):
        name = "leaf"
        config_class = SmallConfig
        strategies = ("plain",)

        def evaluate(self, model: Any) -> dict[str, float]:
            return {"val_loss": 1.0}

    with pytest.raises(
        InvalidExperimentError, match=r"Experiment \(class .*Base, tests/framework/runs/test_broken_exp.*needs a name"
    ):
        ExperimentRegistry.register(Base)
    with registered(Leaf):
        words = ["run", "leaf", "--epochs", "1", "--output-dir", str(tmp_path), "--no-console-output"]
        assert main(words) == 0
    assert "leaf" not in ExperimentRegistry.names()


def test_script_reports_broken_experiment_in_one_line(tmp_path: Path, monkeypatch, capfd) -> None:
    """The exception hook prints the error without a traceback and exits with status 2."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(GOOD.replace(STRATEGIES, '"plain"'))
    with pytest.raises(InvalidExperimentError) as refused:
        runpy.run_path("script.py", run_name="__main__")
    with pytest.raises(SystemExit, match="2"):  # like the interpreter after an error of a script
        without_traceback(sys.__excepthook__)(refused.type, refused.value, refused.tb)
    assert capfd.readouterr().err.startswith("loopscope: Experiment 'broken' (class Broken, ")


@pytest.mark.longer
def test_unbroken_experiment_works(tmp_path: Path, monkeypatch, capfd) -> None:
    with pytest.raises(AssertionError, match="assert \\(0, "):
        told(GOOD, tmp_path, monkeypatch, capfd)
    assert (tmp_path / "output/broken/plain/summary.json").exists()
