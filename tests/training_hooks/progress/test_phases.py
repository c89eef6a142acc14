"""The phases hook on planted trajectories with known transitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.errors import UnsuitableError, UsageError
from loopscope.training_hooks.progress import Phases
from torch import nn

from tests.support import Case, train
from tests.training_hooks.epoch_end import epoch_end

GROKKING = [
    # train_acc, val_acc, weight norm
    (0.30, 0.02, 5.0),
    (0.94, 0.10, 8.0),
    (0.97, 0.17, 9.0),  # 2: memorised, the gap is 0.80
    (1.00, 0.20, 10.0),
    (1.00, 0.70, 10.0),  # 4: the gap is narrow, but the norm is at its maximum
    (1.00, 0.55, 9.5),  # 5: the norm has dropped, but the gap is wide again
    (1.00, 0.61, 9.9),  # 6: both conditions hold
    (0.90, 0.89, 9.0),  # 7: no gap, but no longer memorised
    (0.99, 0.95, 8.0),  # 8: generalised
    (0.80, 0.20, 9.9),  # 9: transitions are final
]


class Weight(nn.Module):
    """A model with a planted weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def of_norm(self, length: float) -> "Weight":
        with torch.no_grad():
            self.weight.fill_(length / 2)
        return self


def follow(hook, trajectory, first=0):
    """Feed a trajectory to a hook, one evaluation per epoch; return its metrics as numbers."""
    model, seen = Weight(), []
    for epoch, (train_acc, val_acc, length) in enumerate(trajectory, start=first):
        context = epoch_end(model.of_norm(length), epoch=epoch, train_acc=train_acc, val_acc=val_acc)
        with torch.no_grad():
            seen.append({name: float(value) for name, value in hook.compute(context).items()})
    return seen


def test_planted_run_has_the_planted_phases():
    """The last report contains the epochs of memorization, clean-up and generalization."""
    seen = follow(Phases(), GROKKING)
    assert [metrics["phase"] for metrics in seen] == [0, 0, 1, 1, 1, 1, 2, 2, 3, 3]
    dates = {name: seen[-1][name] for name in ("memorised_epoch", "cleanup_epoch", "generalised_epoch")}
    assert dates == {"memorised_epoch": 2, "cleanup_epoch": 6, "generalised_epoch": 8}


def test_dates_appear_once_known():
    """The clean-up epoch is NaN between memorization and clean-up."""
    seen = follow(Phases(), GROKKING)
    dated = [[name for name in metrics if name.endswith("_epoch")] for metrics in seen]
    assert dated[1] == []
    assert dated[2] == dated[7] == ["memorised_epoch", "cleanup_epoch"]
    assert [metrics["cleanup_epoch"] != metrics["cleanup_epoch"] for metrics in seen[2:]] == [True] * 4 + [False] * 4


def test_gap_norm_and_drop_have_planted_values():
    metrics = follow(Phases(), GROKKING)[5]
    assert metrics["generalisation_gap"] == pytest.approx(0.45)
    assert metrics["weight_norm"] == pytest.approx(9.5)
    assert metrics["norm_drop"] == pytest.approx(0.05)


def test_generalizing_while_learning_skips_cleanup():
    seen = follow(Phases(), [(0.5, 0.5, 1.0), (0.96, 0.95, 2.0), (1.0, 1.0, 1.0)])
    assert [metrics["phase"] for metrics in seen] == [0, 3, 3]
    assert seen[1]["memorised_epoch"] == seen[1]["generalised_epoch"] == 1
    assert "cleanup_epoch" not in seen[2]


def test_memorizing_model_stays_in_memorized_phase():
    seen = follow(Phases(), [(0.9, 0.1, 1.0), (1.0, 0.1, 2.0), (1.0, 0.12, 1.0), (1.0, 0.1, 0.5)])
    assert [metrics["phase"] for metrics in seen] == [0, 1, 1, 1]


def test_cleanup_and_generalization_may_coincide():
    """One evaluation may reach both."""
    last = follow(Phases(), [(1.0, 0.1, 2.0), (1.0, 1.0, 1.0)])[-1]
    assert (last["phase"], last["cleanup_epoch"], last["generalised_epoch"]) == (3, 1, 1)


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        ({"memorised": 0.98}, [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]),
        ({"norm_drop": 0.0}, [0, 0, 1, 1, 2, 2, 2, 2, 3, 3]),
        ({"norm_drop": 0.04, "gap_share": 0.6}, [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]),
        ({"closed": 0.31}, [0, 0, 1, 1, 3, 3, 3, 3, 3, 3]),
    ],
)
def test_the_thresholds_move_the_transitions(options, phases):
    assert [metrics["phase"] for metrics in follow(Phases(**options), GROKKING)] == phases


@pytest.mark.longer
@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_phases_and_dates_only_move_forward(trajectory):
    """The property holds for any trajectory of accuracies and norms."""
    seen = follow(Phases(), trajectory)
    phases = [metrics["phase"] for metrics in seen]
    assert phases == sorted(phases)
    dates = [seen[-1].get(f"{name}_epoch") for name in ("memorised", "cleanup", "generalised")]
    set_dates = [date for date in dates if date is not None and date == date]
    assert set_dates == sorted(set_dates)


@pytest.mark.parametrize("cut", range(1, len(GROKKING)))
def test_resumed_run_reports_the_same_phases(cut):
    """The run may stop after any evaluation."""
    hook, resumed = Phases(), Phases()
    follow(hook, GROKKING[:cut])
    resumed.load_state_dict(hook.state_dict())
    rest = follow(resumed, GROKKING[cut:], first=cut)
    assert str(rest) == str(follow(Phases(), GROKKING)[cut:])


def test_reset_hook_forgets_the_earlier_run():
    hook = Phases()
    follow(hook, GROKKING)
    hook.reset()
    assert str(follow(hook, GROKKING)) == str(follow(Phases(), GROKKING))


@pytest.mark.parametrize("missing", ["train_acc", "val_acc"])
def test_without_both_accuracies_nothing_is_reported(missing):
    accuracies = {"train_acc": 0.9, "val_acc": 0.1, missing: None}
    assert Phases().compute(epoch_end(Weight(), **accuracies)) == {}


def test_only_epochs_with_an_evaluation_are_reported():
    run = train(Case(), [Phases()], steps=12, eval_every=2)
    assert [step for name, _, step, _ in run.sink.rows("phases/phase")] == [6, 12]


@pytest.mark.parametrize("options", [{"memorised": 0.0}, {"gap_share": 1.5}, {"closed": -0.1}, {"norm_drop": 1.0}])
def test_thresholds_out_of_range_are_refused(options):
    ((option, value),) = options.items()
    with pytest.raises(UsageError, match=f"{option} is {value}; it must be in"):
        Phases(**options)


def test_evaluation_without_both_accuracies_is_refused():
    """The error lists the metrics that exist, and without an evaluation the hook reports nothing."""
    hook = Phases()
    assert hook.compute(epoch_end(nn.Linear(2, 2))) == {}
    with pytest.raises(UnsuitableError, match="the experiment's evaluation reports only val_acc, val_loss"):
        hook.compute(epoch_end(nn.Linear(2, 2), val_acc=0.5, evaluation={"val_acc": 0.5, "val_loss": 1.0}))
