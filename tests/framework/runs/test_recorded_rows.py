"""Rows in the record: the data, their order, and the detection of changes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope import sinks, training_hooks
from loopscope.checkpoints import DIGESTS, ROWS, rows_of_step
from loopscope.cli import main
from loopscope.data import (
    Loader,
    SourceOfRows,
    TensorLoader,
    TorchLoader,
    data_changed,
    fingerprint,
    first_batch,
    fixed_order,
    random_order,
)
from loopscope.errors import UsageError
from loopscope.runs import StepRange
from loopscope.runs.records import RunRecord
from loopscope.runs.resume import refuse_other_data
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from tests.framework.data.test_resumed_loaders import Noisy
from tests.framework.runs.small_experiment import BATCH, STEPS_PER_EPOCH, Small, read_json, registered, session
from tests.framework.runs.small_experiment import ROWS as COUNT

assert sinks
assert training_hooks  # their import fills the registries
RUN = "sampled/plain"
OPTIONS: dict[str, Any] = {"strategies": ["plain"], "epochs": 3, "sinks": False}


class Sampled(Small):
    """Draws its rows with a custom sampler."""

    name = "sampled"
    strategies = ("plain",)
    shift = 0.0
    """Offset of the data."""

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().data()
        return inputs + self.shift, targets

    def build_loader(self, strategy: str) -> TorchLoader:
        dataset = TensorDataset(*self.data())
        sampler = WeightedRandomSampler(torch.linspace(1, 9, COUNT).tolist(), COUNT)
        return TorchLoader(DataLoader(dataset, BATCH, sampler=sampler), self.config.seed)


class Shifted(Sampled):
    """The same experiment on other data."""

    shift = 1.0


def rows_by_step(folder: Path, runner: type[Small]) -> list[list[int]]:
    loader = session(folder, runner).runner.build_loader("plain")
    return [
        rows_of_step(folder / runner.name / "plain", loader, step).tolist()
        for step in range(1, 1 + 3 * STEPS_PER_EPOCH)
    ]


def expected(runner: type[Small]) -> list[list[int]]:
    loader = session(Path(), runner).runner.build_loader("plain")
    return [index.tolist() for epoch in range(3) for index in loader.row_indices(epoch)]


def test_order_from_a_function_is_not_written(tmp_path):
    """The rows of every step are computed from the loader again."""
    session(tmp_path, **OPTIONS).run()
    folder = tmp_path / "small/plain"
    found = read_json(folder / "experiment_config.json")["rows"]
    assert found == {"rows": COUNT, "covers": "every row", "order": "function", "xxh3_128": found["xxh3_128"]}
    assert not (folder / ROWS).exists()
    assert rows_by_step(tmp_path, Small) == expected(Small)


def test_custom_sampler_order_is_written_and_read(tmp_path, monkeypatch):
    """The file has a line for each epoch and gives the rows of every step without the loader."""
    session(tmp_path, Sampled, **OPTIONS).run()
    assert read_json(tmp_path / RUN / "experiment_config.json")["rows"]["order"] == "file"
    lines = [json.loads(line) for line in (tmp_path / RUN / ROWS).read_text().splitlines()]
    assert [(line["epoch"], line["start"], line["sizes"]) for line in lines] == [
        (epoch, 0, [[BATCH, 2], [COUNT - 2 * BATCH, 1]]) for epoch in range(3)
    ]
    whole = expected(Sampled)
    monkeypatch.setattr(TorchLoader, "row_indices", lambda *_: None)  # the file alone
    assert rows_by_step(tmp_path, Sampled) == whole


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("runs-can-be-verified")
@pytest.mark.parametrize("until", [4, 6])  # within the second epoch, and at its end
def test_resumed_run_records_the_same_rows(tmp_path, until):
    """A torn last line is replaced, and an overwritten run starts a new file."""

    class Stopping(Sampled):
        stops = True

        def compute_loss(self, model: Any, batch: Any) -> Any:
            self.steps = getattr(self, "steps", 0) + 1
            if self.stops and self.steps > until:
                raise KeyboardInterrupt
            return super().compute_loss(model, batch)

    options = {**OPTIONS, "checkpoint_every_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        session(tmp_path, Stopping, **options).run()
    torn = tmp_path / RUN / ROWS
    torn.write_text(torn.read_text() + '{"epoch": 2, "start": 0, "si')
    Stopping.stops = False
    session(tmp_path, Stopping, **options, resume=True).run()
    assert rows_by_step(tmp_path, Stopping) == expected(Sampled)
    session(tmp_path, Stopping, **OPTIONS, overwrite=True).run()
    assert len(torn.read_text().splitlines()) == 3


@pytest.mark.guarantee("runs-can-be-verified")
@pytest.mark.parametrize("kind", ["rewind", "resume", "validate"])
def test_changed_data_are_refused(tmp_path, kind):
    """Rewind, resume and validate raise with both digests and leave the record unchanged."""
    options = {**OPTIONS, "save_checkpoints": 1, "keep_checkpoints": 9}
    session(tmp_path, Sampled, **options).run()
    if kind == "resume":
        (tmp_path / RUN / "plain_final.pt").unlink()
    now, record = (
        session(tmp_path, Shifted, **options, resume=kind == "resume"),
        tmp_path / RUN / "experiment_config.json",
    )
    acts = {"rewind": lambda: now.rewind(StepRange(4, 9)), "resume": now.run, "validate": now.validate}
    was = read_json(record)["rows"]["xxh3_128"]
    before = record.read_bytes()
    with pytest.raises(UsageError) as refused:
        acts[kind]()
    sentence = str(refused.value)
    assert f"have changed: {COUNT} rows, digest {was} over every row then, {COUNT} rows, digest " in sentence
    assert "are still valid, but its steps cannot be trained again" in sentence
    assert record.read_bytes() == before
    if kind != "resume":  # a resume also checks the record in the checkpoint
        old = read_json(record)
        del old["rows"]
        record.write_text(json.dumps(old))
        with pytest.raises(
            Exception, match="diverges from"
        ):  # without a digest the comparison of bits detects the change
            acts[kind]()


@pytest.mark.longer
def test_digests_cover_rows_since_the_previous_digest(tmp_path, capfd):
    """A rewind compares them, and digests at other steps are not compared."""
    for name, every in (("a", 2), ("b", 4)):
        session(tmp_path / name, Sampled, **OPTIONS, digest_every=every, checkpoint_every_steps=3).run()
    lines = [json.loads(line) for line in (tmp_path / "a" / RUN / DIGESTS).read_text().splitlines()]
    assert [(line["since"], line["step"]) for line in lines] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert len({line["entries"]["rows"] for line in lines}) == 4
    now = session(tmp_path / "a", Sampled, **OPTIONS, digest_every=2)
    assert now.rewind(StepRange(5, 8))[2] == [4, 6, 8, 9]
    assert main(["diff", *[str(tmp_path / name / RUN) for name in "ab"]]) == 0  # other steps do not compare


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0))


@pytest.mark.parametrize(
    ("made", "covers", "order", "rows"),
    [
        (TorchLoader(DataLoader(Stream(), 2), 1), "nothing", "unknown", None),
        (TorchLoader(DataLoader(Noisy(), 2), 1), "the first batch", "function", 11),
        (TorchLoader(DataLoader(TensorDataset(torch.ones(5)), 2, shuffle=True), 1), "every row", "function", 5),
        (TorchLoader(DataLoader(TensorDataset(torch.ones(5)), batch_size=None), 1), "every row", "unknown", 5),
    ],
)
def test_fingerprint_states_coverage_order_and_rows(made, covers, order, rows):
    """It is the same for two calls, and has no digest for a stream."""
    found = [fingerprint(made, lambda: first_batch(made)) for _ in range(2)]
    assert found[0] == found[1]
    assert (found[0]["covers"], found[0]["order"], found[0]["rows"]) == (covers, order, rows)
    assert ("xxh3_128" in found[0]) == (covers != "nothing")


class Held(Loader):
    """A loader that contains an array but yields no rows."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def shuffled(self, seed: int) -> "Held":
        return self

    def source_of_rows(self) -> SourceOfRows:
        return SourceOfRows(len(self.array), [self.array])


def of(array: Any) -> dict[str, Any]:
    return fingerprint(Held(array), lambda: None)


@pytest.mark.longer
@given(data=st.data(), kind=st.sampled_from(["float32", "int64", "uint8", "bool"]))
@settings(deadline=None, max_examples=40)
def test_fingerprint_detects_any_changed_byte(data, kind):
    """This holds for arrays and for contiguous or transposed tensors."""
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    array = (np.arange(rows * columns).reshape(rows, columns) % 2).astype(kind)
    for held in (array, torch.from_numpy(array.copy()), torch.from_numpy(array.T.copy()).T):
        before = of(held)
        assert not data_changed(before, of(held))
        place = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
        held[place] = not held[place]
        assert data_changed(before, of(held))
        held[place] = not held[place]


def test_large_data_are_fingerprinted_in_spread_pieces():
    """Changes at the ends and of the length are detected; changes between two pieces are not."""
    data = np.zeros(9 * 2**24, np.uint8)  # 144 MiB
    before = of(data)
    assert before["covers"] == "pieces"
    for place in (0, 5, len(data) - 1):
        data[place] = 1
        assert data_changed(before, of(data))
        data[place] = 0
    assert data_changed(before, of(data[:-1]))
    data[2**20 + 7] = 1  # between two pieces
    assert not data_changed(before, of(data))


def test_a_record_without_a_digest_refuses_nothing():
    now = fingerprint(TensorLoader([torch.ones(3)], 2, random_order(3, 1)), lambda: None)
    assert not data_changed({}, now)
    assert data_changed(now, {})
    assert data_changed(now, fingerprint(TensorLoader([torch.ones(4)], 2, fixed_order(torch.arange(4))), lambda: None))


class Rewound(Sampled):
    name = "rewound"

    def describe_row(self, index: int) -> Any:
        if index % 3 == 0:
            raise LookupError("no such row")
        return {1: torch.zeros(2, 2), 2: ("row", index)}[index % 3]


@pytest.mark.longer
def test_rewind_shows_rows_behind_a_step(tmp_path, capfd):
    """The rows with the largest losses are shown with index, loss and description."""
    with registered(Rewound):
        words = ["run", "rewound", "--epochs", "2", "--no-console-output", "--output-dir", str(tmp_path)]
        assert main([*words, "--batch-size", "8"]) == 0
        run = tmp_path / "rewound/plain"
        capfd.readouterr()
        assert main(["rewind", str(run), "--step", "2", "--until", "3", "--hooks", "batch_rows"]) == 0
    shown = capfd.readouterr().out
    record = next(
        json.loads(line)
        for line in (run / "rewinds/steps_2_to_3/plain.jsonl").read_text().splitlines()
        if "batch_rows/loss" in line
    )
    index, losses, norms = (record[f"batch_rows/{name}"]["values"] for name in ("index", "loss", "gradient_norm"))
    told = {0: "describe_row({}) failed: LookupError: no such row", 1: "a tensor of shape (2, 2)", 2: "('row', {})"}
    for at in (1, 2):
        assert f"Step {at + 1}: the largest losses of {len(losses[at])} rows\n" in shown
        assert index[at] == rows_of_step(run, session(tmp_path, Rewound).runner.build_loader("plain"), at + 1).tolist()
        assert record["batch_rows/largest_loss_share"]["values"][at] == pytest.approx(max(losses[at]) / sum(losses[at]))
        for loss, row in sorted(zip(losses[at], index[at], strict=True), reverse=True)[:3]:
            assert any(line.split()[:2] == [str(row), f"{loss:.4g}"] and line.endswith(told[row % 3].format(row))
                       for line in shown.splitlines())  # fmt: skip
        assert len(norms[at]) == len(losses[at])


def test_record_with_missing_row_fields_is_refused(tmp_path):
    before = RunRecord(experiment="one", strategy="plain", config={}, rows={"xxh3_128": "a"})
    now = replace(before, rows={"rows": 3, "covers": "every row", "xxh3_128": "b"})
    with pytest.raises(UsageError, match="an unknown number of rows, digest a over None then, 3 rows, digest b over"):
        refuse_other_data(tmp_path, before, now)
