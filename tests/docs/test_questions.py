"""The numbers and versions on the page of questions are those of benchmarks, records, constraints and hooks."""

import inspect
import re
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from torch import nn

from docs import generate
from tests.docs.markdown import ROOT, table_with, tables

PAGE = ROOT / "docs/faq.md"
TEXT = " ".join(PAGE.read_text(encoding="utf-8").split())
COSTS = {row["what"]: row for row in table_with(PAGE, "what", "cost", "row")}
BENCHMARKS = [row for table in tables(ROOT / "docs/data/benchmarks.txt") for row in table if "Measured" in row]


@pytest.mark.parametrize("what", COSTS)
def test_costs_are_those_of_the_benchmarks(what: str) -> None:
    """The first number of a cost is a measured one of its row, and further times are those that its row names."""
    name, cost = COSTS[what]["row"], COSTS[what]["cost"]
    rows = [row for row in BENCHMARKS if row["Figure"] == name]
    assert [row for row in rows if re.match(rf"{re.escape(row['Measured'])}[ ,]", cost)], (
        cost,
        [row["Measured"] for row in rows],
    )
    for time in re.findall(r"torch takes ([\d.]+ s)", cost):
        assert time in rows[0]["Against"]


def test_versions_are_those_of_the_constraints() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M))
    named = re.findall(r"\b(transformers|accelerate|lightning|torchao) (\d+\.\d+)", TEXT, re.I)
    assert len(named) == 4
    assert {name: version for name, version in named if not pins[name.lower()].startswith(f"{version}.")} == {}


def test_named_models_are_those_of_the_table() -> None:
    (heading,) = re.findall(r"^\| hook \|(.*)\|$", (ROOT / "docs/data/real-models.txt").read_text("utf-8"), re.M)
    models = {cell.split(",")[0].strip() for cell in heading.split("|")}
    (row,) = re.findall(r"\| (GPT-2, [^|]*) \|", TEXT)
    assert set(re.findall(r"GPT-\w+|[A-Z][\w-]+", row)) == models


def trained(folder: Path, epochs: int, steps: int, **options: Any) -> dict[str, int]:
    """Train a model of four tensors with evaluations, and return the sizes of the run's files."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer, data = torch.optim.AdamW(model.parameters()), torch.randn(8 * steps, 8).split(8)
    loss = lambda model, batch: model(batch).square().mean()
    with loopscope.attach(
        model, optimizer, out=folder / "run", display="none", loss=loss, budget=None, **options
    ) as scope:
        for _ in range(epochs):
            for batch in scope.batches(data):
                scope.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            scope.evaluate(lambda: {"val_loss": loss(model, data[0]).item()})
    return {path.name: path.stat().st_size for path in (folder / "run").iterdir()}


def size(sentence: str) -> float:
    """Return the number of the page at this place."""
    (number,) = re.findall(sentence, TEXT)
    return float(number)


def test_bytes_of_an_epoch_are_stated(tmp_path: Path) -> None:
    sizes = [trained(tmp_path / str(epochs), epochs, 10, hooks=[])["run.jsonl"] for epochs in (5, 25)]
    assert (sizes[1] - sizes[0]) / 20 == pytest.approx(size(r"about (\d+) bytes per epoch"), rel=0.1)


def test_files_of_a_run_without_hooks_are_stated(tmp_path: Path) -> None:
    sizes = trained(tmp_path, 1, 10, hooks=[], sinks=[])
    assert sorted(sizes) == ["experiment_config.json", "files.json", "summary.json"]
    assert sum(sizes.values()) / 1000 == pytest.approx(size(r"together (\d+) kB"), rel=0.2)


@pytest.mark.slow
def test_size_of_the_record_of_observers_is_stated(tmp_path: Path) -> None:
    sizes = trained(tmp_path, 1, 1000, with_hooks="observers")
    assert sizes["run.jsonl"] / 1000 == pytest.approx(size(r"wrote about (\d+) kB in 1,000 steps"), rel=0.1)


def test_size_of_families_is_stated() -> None:
    """No shipped hook with these options reports more members by default."""
    options = [inspect.signature(hook).parameters for hook in generate.shipped_hooks()]
    sizes = [each["top"].default + each["bottom"].default for each in options if {"top", "bottom"} <= each.keys()]
    assert len(sizes) > 5
    assert max(sizes) == size(r"at most (\d+) members at a step")
