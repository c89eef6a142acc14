"""Every branch of ``what_if`` compared with a run that was trained in that way."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import sinks, training_hooks
from loopscope.data import Batch
from loopscope.errors import UsageError
from loopscope.report import inspect_run
from loopscope.runs import RunOptions, Session
from loopscope.sinks import JSONLSink
from loopscope.training_hooks.laboratory import WhatIf
from loopscope.training_hooks.laboratory.rows import exclude_shared_rows, outliers, repeated
from torch.optim.lr_scheduler import LambdaLR

from tests.framework.laboratory.planted import (
    COPIES,
    FLIPPED,
    HIDDEN,
    Planted,
    PlantedAdamW,
    PlantedConfig,
    PlantedLoader,
)
from tests.framework.runs.small_experiment import registered
from tests.support.processes import own_process

FILLED = (sinks, training_hooks)
STEP = 12


class Rates(Planted):
    """Planted experiment with another learning rate in one step."""

    factor = 1.0

    def build_scheduler(self, optimizer):
        return LambdaLR(optimizer, lambda step: self.factor if step == STEP - 1 else 1.0)


class HalfRate(Rates):
    factor = 0.5


class Forgetful(Planted):
    """Planted experiment whose optimizer is reset in one step."""

    def build_optimizer(self, model):
        class Forgets(PlantedAdamW):
            def step(self, closure=None):
                for entries in self.state.values():
                    if entries["step"] == STEP - 1:
                        for value in entries.values():
                            value.zero_()
                return super().step(closure)

        optimizer = Forgets(model.parameters(), lr=3e-3)
        optimizer.config = self.config
        return optimizer


class Once(Planted):
    """Planted experiment without repeated rows."""

    def build_loader(self, strategy):
        class Unrepeated(PlantedLoader):
            def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
                for number, batch in enumerate(super().batches(epoch, start), epoch * len(self) + start + 1):
                    yield tuple(each[[0, *range(COPIES, 64)]] for each in batch) if number == STEP else batch

        return Unrepeated(self.config, self.data())


def measured(folder: Path, runner: type[Planted] = Planted, hooks: tuple[str, ...] = (), **options: Any) -> Any:
    """Train a run, and return the metrics of ``what_if`` by metric and branch."""
    of_hook = {"step": STEP, **options.pop("what_if", {})}
    options = {"output_dir": folder, "steps": STEP + 6, "plant_step": STEP, **options}
    run = RunOptions(
        hooks=["what_if", *hooks],
        hook_options={"what_if": of_hook, **{hook: {"max_norm": 0.2} for hook in hooks if hook == "grad_clip"}},
    )
    with registered(runner):
        Session(runner(PlantedConfig(**options)), run, lambda: [JSONLSink()]).run()
    found: dict[str, Any] = {}
    for _, _, _, metric, value in inspect_run(folder / "planted/plain").points:
        name, _, branch = metric.removeprefix("what_if/").partition("/")
        found.setdefault(name, {})[branch] = value[0] if isinstance(value, list) and len(value) == 1 else value
    return found


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    folder = tmp_path_factory.mktemp("usual")
    options = {"usual_rate": 30.0, "usual_norm": 0.2, "watch": "gradient/0.weight"}
    return measured(folder, hooks=("step_history",), what_if=options), folder


@own_process
def test_repeated_step_matches_run(usual):
    found, folder = usual
    recorded = inspect_run(folder / "planted/plain").points
    (norm,) = [
        value for _, step, _, name, value in recorded if name == "step_history/gradient/0.weight" and step == STEP
    ]
    assert found["size"]["as_it_was"] == found["size"]["float32"] == pytest.approx(norm)
    assert found["effect"]["as_it_was"] == [found["effect"]["run"]] * 5
    assert found["loss"]["half_rate"] == found["loss"]["as_it_was"][0]
    assert len(found["effect"]["fresh"]) == len({*found["effect"]["fresh"]}) == 39


@pytest.mark.slow_rows("fresh_state-Forgetful")
@pytest.mark.parametrize(("branch", "runner"), [("half_rate", HalfRate), ("fresh_state", Forgetful)])
@own_process
def test_branch_matches_run_trained_that_way(branch, runner, usual, tmp_path):
    """The branches halve the learning rate or reset the optimizer state."""
    assert usual[0]["effect"][branch] == measured(tmp_path, runner)["effect"]["run"] != usual[0]["effect"]["run"]


@pytest.mark.slow
@own_process
def test_usual_rate_branch_matches_run(usual, tmp_path):
    class Faster(Rates):
        factor = 30.0

    assert usual[0]["effect"]["usual_rate"] == measured(tmp_path, Faster)["effect"]["run"]


@own_process
def test_changed_rate_follows_the_schedule(usual, tmp_path):
    """After one step at 32 times the learning rate, the branch without it continues like the run without it."""

    class Faster(Rates):
        factor = 32.0

    found = measured(tmp_path, Faster, what_if={"usual_rate": 1 / 32})
    assert found["later"]["usual_rate"] == usual[0]["later"]["as_it_was"][0] != found["later"]["as_it_was"][0]


@pytest.mark.slow
@own_process
def test_clipped_branch_matches_clipped_run(usual, tmp_path):
    """Other branches have no committing hooks, so they differ from the clipped run."""
    found = measured(tmp_path, hooks=("grad_clip",), what_if={"usual_norm": 0.2})
    assert found["effect"]["run"] == found["effect"]["clipped"]  # branches have no hooks that commit, the run has
    assert found["effect"]["as_it_was"][0] != found["effect"]["run"]


@pytest.mark.slow
@own_process
def test_branch_without_repeats_matches_deduplicated_run(tmp_path):
    """The hook finds the repeated rows of the batch and trains a branch with each row once."""
    found = measured(tmp_path / "repeated", plant="repeated_row", what_if={"watch": "copies"})
    once = measured(tmp_path / "once", Once, plant="repeated_row")
    assert found["standing_out"][""] == [*range(1, COPIES)]
    assert found["effect"]["without_rows"] == once["effect"]["run"]
    assert [found["size"][branch] for branch in ("as_it_was", "without_rows")] == [COPIES, 1]
    assert found["rows"]["index"][:COPIES] == [found["rows"]["index"][0]] * COPIES


@pytest.mark.slow
@own_process
def test_flipped_element_is_reported_and_restored(tmp_path):
    """The branch with the restored element has almost no effect on the loss."""
    found = measured(tmp_path, plant="bit", seed=3)
    place, was, now = found["element"][FLIPPED]
    assert place == 3 * 37 % HIDDEN
    assert math.isfinite(was)
    assert not abs(now) < 1e3 * abs(was)  # infinite or NaN
    assert not abs(found["effect"]["run"]) < 1e3
    assert found["effect"]["element_restored"] < 0.1


def test_outliers_exceed_all_other_rows():
    """An outlier is also far from the median of the other rows."""
    others = torch.rand(2, 100, dtype=torch.float64) + 1
    own = torch.stack([torch.tensor([1.5, 40.0, 1.2]), torch.tensor([1.5, 1.2, torch.inf])]).double()
    assert outliers(own, others) == [1, 2]
    assert outliers(torch.full((2, 3), 2.05).double(), others) == []


def test_row_that_is_not_finite_hides_no_scale():
    """Positive values are compared by logarithms, also if another row is NaN."""
    others = torch.tensor([[1.0, 10.0, 100.0, 1000.0]] * 2).double()
    own = torch.tensor([[5000.0, torch.nan]] * 2).double()
    assert outliers(own, others) == [1]


def test_repeated_rows_need_unique_rows_elsewhere():
    batch = (torch.tensor([[1.0], [2.0], [1.0], [1.0]]), torch.tensor([0, 1, 0, 0]))
    single = (torch.arange(4.0)[:, None], torch.arange(4))
    assert repeated(batch, [single]) == [2, 3]
    assert repeated(batch, [batch]) == []
    assert repeated(single, [single]) == []


def test_fresh_batches_have_no_rows_of_the_batch():
    batch, same = (torch.tensor([1.0, 2.0]),), (torch.tensor([2.0, 1.0]),)
    assert exclude_shared_rows(batch, [same]) == []
    (found,) = exclude_shared_rows(batch, [(torch.tensor([3.0, 2.0, 4.0]),)])
    assert found[0].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"step": 0}, "what_if.step is 0; steps are counted from 1."),
        ({"fresh": 1}, "what_if.fresh is 1; a spread needs at least 2."),
        ({"follow": 0}, "what_if.follow is 0; it must be at least 1."),
        ({"usual_rate": 0.0}, "what_if.usual_rate is 0.0; it must be positive."),
        ({"usual_norm": -1.0}, "what_if.usual_norm is -1.0; it must be at least 0."),
    ],
)
def test_options_are_checked(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        WhatIf(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"layer": "9"}, "Unknown layer '9'"), ({"watch": "gradient/x"}, "Unknown watched quantity 'gradient/x'")],
)
def test_names_not_in_model_are_refused(options, sentence, tmp_path):
    with pytest.raises(UsageError, match=sentence):
        measured(tmp_path, what_if=options)
