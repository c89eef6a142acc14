"""Arguments of attach that it cannot use: one sentence with the value and the remedy, before anything happens."""

from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import HookError, UsageError
from loopscope.hooks import StepSchedule, TrainingHook
from torch import nn

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "function as hook": ({"hooks": [lambda ctx: {}]}, "hooks contains a function"),
    "None as hook": ({"hooks": [None]}, "hooks contains None"),
    "class that is no hook": ({"hooks": [dict]}, "hooks contains the class dict"),
    "the base class": ({"hooks": [TrainingHook]}, "hooks contains the class TrainingHook"),
    "a module as hook": ({"hooks": [nn.Linear(1, 1)]}, "hooks contains a Linear"),
    "options in a list": ({"hook_options": {"norms": [1]}}, "hook_options is {'norms': [1]}; it must be a dict"),
    "options by number": ({"hook_options": {1: {}}}, "hook_options is {1: {}}; it must be a dict by the names"),
    "schedule as number": ({"schedules": {"norms": 3}}, "schedules is {'norms': 3}; it must be a dict by the names"),
    "list of schedules": ({"schedules": [StepSchedule()]}, "it must be a dict by the names of hooks"),
    "list as config": ({"config": [1]}, "config is a list; it must be a dict"),
    "number as loss": ({"loss": 3}, "loss is 3; it must be a function: loss(model, batch)"),
    "loss without arguments": ({"loss": lambda: 1}, "loss(model, batch) cannot be called"),
    "criterion as loss": (
        {"loss": nn.CrossEntropyLoss()},
        "loss is a CrossEntropyLoss, which takes outputs and targets",
    ),
    "evaluation of a loader": ({"evaluate": lambda model, loader: {}}, "evaluate(model) cannot be called"),
    "number as scheduler": ({"scheduler": 3}, "The scheduler is 3"),
    "class of a scheduler": ({"scheduler": torch.optim.lr_scheduler.StepLR}, "The scheduler is the class StepLR"),
    "scheduler of another optimizer": (
        {"scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.AdamW([torch.ones(1)]), 1)},
        "The StepLR schedules another optimizer than the one given to attach",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_at_once(tmp_path: Path, name: str) -> None:
    """The folder of an earlier run stays as it was."""
    arguments, sentence = WRONG[name]
    kept = tmp_path / "run" / "kept.txt"
    kept.parent.mkdir()
    kept.write_text("earlier")
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError) as error:
        loopscope.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), **{"out": kept.parent, "display": "none"} | arguments
        )
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert kept.read_text() == "earlier"


@pytest.mark.parametrize("seed", [0, -1, True + 0, torch.tensor(3)])
def test_integers_of_any_type_are_seeds(tmp_path: Path, seed: Any) -> None:
    model = nn.Linear(2, 1)
    loopscope.attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), out=tmp_path / "run", seed=seed, display="none"
    ).close()


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda model, batch: 1.0, "The loss function returned a float"),
        (lambda model, batch: model(batch), "returned a tensor of shape (4, 1); return one number"),
    ],
    ids=["float", "vector"],
)
def test_losses_that_are_no_number_are_named(tmp_path: Path, loss: Any, sentence: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with loopscope.attach(
            model, optimizer, hooks=["hessian"], loss=loss, out=tmp_path / "run", display="none"
        ) as scope:
            for batch in scope.batches([torch.ones(4, 2)] * 2):
                scope.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(HookError) as error:
        train()
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("given", "named", "sentence"),
    [
        ("scheduler", {}, "given a StepLR after target and optimizer; give all other arguments by name: scheduler=..."),
        ("hooks", {}, "given a list after target and optimizer; give all other arguments by name: hooks=..."),
        ("", {"hook": ["norms"]}, "Unknown argument of attach: 'hook'. Did you mean 'hooks'? Known: accelerator,"),
        ("", {"log_evry": 10}, "Did you mean 'log_every'?"),
    ],
    ids=["scheduler", "hooks", "hook", "log_evry"],
)
def test_arguments_that_attach_does_not_have(given: str, named: dict[str, Any], sentence: str) -> None:
    """The message names the argument that was meant."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    surplus = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "hooks": ["norms"]}
    attach: Any = loopscope.attach
    with pytest.raises(UsageError) as error:
        attach(model, optimizer, *([surplus[given]] if given else []), **named)
    assert sentence in str(error.value)
