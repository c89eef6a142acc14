"""Warnings of loopscope stay warnings under filters that turn all warnings into errors."""

import os
import subprocess
import sys
import warnings

import loopscope
import pytest
import torch
from loopscope.errors import RunNotice, warn
from loopscope.hooks import Alert, HookPoint
from loopscope.sinks import JSONLSink
from torch import nn

from tests.support import SpyHook

GENERAL = [Warning, UserWarning]


class Alarming(SpyHook):
    """Returns an alert at every step."""

    name = "alarming"
    hook_points = frozenset({HookPoint.POST_STEP})

    def __init__(self) -> None:
        super().__init__(lambda ctx: {"one": 1.0})

    def check(self, values, step):
        return [Alert("It is late.")]


def train(out, **options) -> int:
    """Train three steps with a group, whose unsuitable hooks are left out with notices; return the steps."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"out": out, "display": "none", "log_every": 1, "with_hooks": "observers"} | options
    with loopscope.attach(model, optimizer, **given) as scope:
        for batch in scope.batches([torch.ones(2, 4)] * 3):
            scope.backward(model(batch).square().mean())
            optimizer.step()
    return scope._attached.driver.loop.step


@pytest.mark.longer
@pytest.mark.parametrize("category", GENERAL)
def test_notices_do_not_end_training(tmp_path, category):
    """Hooks that are left out, and alerts, are reported under a general filter; the training continues."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", category)
        assert train(tmp_path / "run", hooks=[Alarming()]) == 3
    assert len((tmp_path / "run" / "alerts.jsonl").read_text().splitlines()) >= 3


@pytest.mark.longer
@pytest.mark.parametrize("category", GENERAL)
def test_failed_sink_does_not_end_training(tmp_path, monkeypatch, category):
    """A sink that fails is reported as a warning under a general filter."""

    def fail(*_, **__):
        raise OSError(28, "No space left")

    monkeypatch.setattr(JSONLSink, "emit", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error", category)
        assert train(tmp_path / "run") == 3


@pytest.mark.parametrize("category", [RunNotice, Alert])
def test_chosen_category_raises(category):
    """A filter that names a category of loopscope raises its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", category)
        with pytest.raises(category):
            warn("a sentence", category)


def test_chosen_message_raises():
    """A filter that names the message raises it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a sent")
        with pytest.raises(UserWarning):
            warn("a sentence")


def test_general_filter_still_shows_warning():
    """The warning is shown instead of raised."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        warn("a sentence")
    assert [str(item.message) for item in shown] == ["a sentence"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("general", ["error", "error::UserWarning"])
def test_command_runs_with_warnings_as_errors(tmp_path, general):
    """The command issues notices and ends with status 0 under PYTHONWARNINGS."""
    sizes = "--p 11 --train-size 80 --test-size 40 --epochs 2 --batch-size 20 --strategy stride"
    words = (
        f"run mod_arithmetic {sizes} --checkpoint-every-steps 1 --with-hooks observers --output-dir {tmp_path}".split()
    )
    environment = {**os.environ, "PYTHONWARNINGS": general}
    done = subprocess.run([sys.executable, "-m", "loopscope", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
