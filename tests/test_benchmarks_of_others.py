"""The other frameworks take the same steps as the bare loop, their guarantees are measured, and GPU rows exist."""

import math
from pathlib import Path

import pytest
import torch
from loopscope.experiments.mod_arithmetic.runner import QUICK

from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.gpu_cost import on_device
from tests.benchmarks.others.cost import read, side_by_side, written
from tests.benchmarks.others.extras import as_they_do_them, read_rows, written_rows
from tests.benchmarks.others.frameworks import BARE, FRAMEWORKS, Framework, installed
from tests.benchmarks.others.prices import KINDS, Side
from tests.benchmarks.others.work import THREE_VALUES, Asked, Data, Seen, TurnsOfData, Work, bare_steps, batches_of
from tests.benchmarks.report import data, full_page, renewed
from tests.benchmarks.rows import MICROSECONDS, Effort, Row
from tests.benchmarks.subjects import small_mlp
from tests.benchmarks.timing import Spread

TINY = QUICK | {"train_size": 96, "test_size": 32, "embed_dim": 16, "ff_dim": 32}
LOOK = Effort(share=0.0, quick=TINY, paper=TINY)
HERE = list(installed())
BATCHES, EPOCHS = 3, 2
each_framework = pytest.mark.parametrize("framework", HERE, ids=lambda framework: framework.title)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def trained(framework: Framework, folder: Path, asked: Asked, data: Data | None = None) -> list[torch.Tensor]:
    """Return the weights after a few epochs."""
    subject = small_mlp()
    model, optimizer = subject.task.model, subject.task.optimizer
    framework.train(Work(model, optimizer, data or Data(batches_of(subject, BATCHES)), EPOCHS, folder), asked)
    return list(model.parameters())


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory) -> dict[bool, list[torch.Tensor]]:
    """Return the weights of the bare loop, without and with clipping."""
    folder = tmp_path_factory.mktemp("bare")
    return {clips: trained(BARE, folder, Asked(clips=clips)) for clips in (False, True)}


def test_required_frameworks_are_installed():
    assert {"bare loop", "loopscope", "Lightning", "HF Trainer"} <= {framework.title for framework in HERE}


@pytest.mark.trainer
@each_framework
@pytest.mark.parametrize("clips", [False, True])
def test_every_framework_trains_like_the_bare_loop(framework, clips, by_hand, tmp_path):
    """Final weights are equal bit for bit, with and without clipping."""
    asked = Asked(receives_all_events=True, callbacks=THREE_VALUES, norms=True, clips=clips)
    assert all(map(torch.equal, trained(framework, tmp_path, asked), by_hand[clips]))


@pytest.mark.trainer
@each_framework
def test_callbacks_see_loss_and_gradients_each_step(framework, tmp_path):
    """The values of every step match those in the bare loop."""
    seen: list[tuple[float, float]] = []

    def notes(now: Seen):
        seen.append((float(now.loss), float(next(now.model.parameters()).grad.norm())))
        return {}

    trained(framework, tmp_path, Asked(callbacks=[notes]))
    by_hand, seen = list(seen), []
    trained(BARE, tmp_path, Asked(callbacks=[notes]))
    assert len(seen) == BATCHES * EPOCHS
    assert by_hand == seen


@pytest.mark.trainer
@each_framework
def test_bare_step_precedes_each_batch(framework, tmp_path):
    """Steps of the bare loop alternate with batches of a framework and train the same weights."""
    subject = small_mlp()
    batches = batches_of(subject, BATCHES)
    data = TurnsOfData(batches, bare_steps(subject.task.model, subject.task.optimizer, batches))
    weights = trained(framework, tmp_path, Asked(), data)
    assert len(data.begins) == len(data.bare) == EPOCHS
    assert all(map(torch.equal, weights, subject.task.model.parameters()))


@pytest.mark.slow
@pytest.mark.trainer
def test_only_loopscope_keeps_bits_despite_callbacks():
    """In every other framework, draws change the weights and writes are not noticed."""
    rows = {row.figure.split()[0]: row for row in side_by_side(LOOK)}
    assert len(rows) == len(FRAMEWORKS)
    tried = {name: (row.draws, row.writes) for name, row in rows.items() if not row.why_not}
    assert tried.pop("loopscope") == ("same bits", "an error that names it; of an intervention: undone")
    assert set(tried.values()) == {("other weights", "not noticed")}
    assert all(math.isfinite(number) for row in rows.values() for number in row.numbers)


@pytest.mark.slow
@pytest.mark.trainer
def test_extra_costs_are_measured_per_framework():
    """The table has clipping and gradient norms for each, and averages of weights where they exist."""
    figures = [row.figure for row in as_they_do_them(LOOK)]
    assert [figure.split(":")[0] for figure in figures] == sorted(
        (figure.split(":")[0] for figure in figures),
        key=["Clipping", "Average of weights", "Norm of every gradient"].index,
    )
    ways = {framework.title: bool(framework.module.AVERAGES) for framework in HERE}
    assert len(figures) == 2 * len(ways) + sum(ways.values())


def test_row_survives_transfer_between_environments():
    """Serialized rows are read back equal."""
    side = Side("fastai", dict.fromkeys(KINDS, Spread(3e-4, 2e-4, 1e-5)), "a list", "other weights", "not noticed")
    assert read(written(side)) == side
    rows = [Row("Clipping: fastai, GradientClip", "fastai; bare step 5.00 ms", MICROSECONDS, Spread(2e-6, 1e-6, 5e-7))]
    assert read_rows(written_rows(rows)) == rows


def test_uninstalled_framework_is_named_in_table():
    cells = Side("fastai", why_not="not installed").cells()
    assert cells == ["fastai (not installed)", *["–"] * 6]


def test_page_begins_with_side_by_side_table():
    """Extra costs follow, and a missing GPU is stated in its section."""
    side = Side("Ignite", dict.fromkeys(KINDS, Spread(3e-4, 2e-4, 1e-5)), "memory", "other weights", "not noticed")
    row = Row("Clipping", "nothing", MICROSECONDS, Spread(2e-6, 1e-6, 5e-7))
    rows = {title: [row] for title, _ in BENCHMARKS.values()} | {"Side by side": [side, row], "On a GPU": []}
    text = full_page(data(rows))
    first = text.index("## Side by side")
    assert text.index("## ") == first
    assert text.index("| Ignite") < text.index("| Clipping") < text.index("## The loop")
    assert "300.0 µs ± 5.0" in text[first : text.index("## The loop")]
    assert "Not run: the machine has no GPU." in text[text.index("## On a GPU") :]


def test_remeasured_section_replaces_only_itself():
    """A new section is inserted in order; one from another machine states it."""
    row = Row("Clipping", "nothing", MICROSECONDS, Spread(2e-6, 1e-6, 5e-7))
    old = data({"Clipping": [row], "Sinks": [row], "Memory": [row]})
    now = {"Sinks": [Row("Sinking", "nothing", MICROSECONDS, Spread(3e-6, 1e-6, 5e-7))]}
    order = ["Clipping", "Displays", "Sinks", "Memory"]
    assert renewed(old, now, order) == data({"Clipping": [row], **now, "Memory": [row]})
    new = {"Displays": [row]}
    assert renewed(old, new, order) == data({"Clipping": [row], **new, "Sinks": [row], "Memory": [row]})
    elsewhere = renewed(old.replace("cores", "boxes"), now, order)
    assert elsewhere.count("boxes") == elsewhere.count("This section: measured on") == 1


@pytest.mark.longer
def test_gpu_rows_are_measurable_on_cpu():
    """Six rows have finite numbers."""
    rows = list(on_device(torch.device("cpu"), LOOK, {"eager": None}))
    assert len(rows) == 6
    assert all(math.isfinite(number) for row in rows for number in row.numbers)
