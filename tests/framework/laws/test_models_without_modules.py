"""Laws of models that are lists of weights, which functions use."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope.cli import main
from loopscope.integrations.other_modules import UnownedTensors
from torch import Tensor
from torch.nn import functional as F

ROWS, TIME, WORDS, WIDTH = 16, 6, 11, 24
Weights = list[Tensor]


def weights(*shapes: tuple[int, ...]) -> Weights:
    torch.manual_seed(0)
    return [(0.3 * torch.randn(shape)).requires_grad_() for shape in shapes]


def network(mixes: bool) -> Callable[[Weights], Tensor]:
    def loss(parts: Weights) -> Tensor:
        x = torch.randn(ROWS, 4)
        hidden = torch.relu(x @ parts[0] + parts[1])
        outputs = (hidden + hidden.roll(1, 0) if mixes else hidden) @ parts[2]
        return F.mse_loss(outputs[:, 0], x.sum(1)) + 1e-4 * parts[0].square().sum()

    return loss


def attention(is_causal: bool) -> Callable[[Weights], Tensor]:
    def loss(parts: Weights) -> Tensor:
        tokens = torch.randint(0, WORDS, (ROWS, TIME + 1))
        hidden = parts[0][tokens[:, :-1]]
        scores = torch.einsum("btd,bsd->bts", hidden @ parts[1], hidden)
        if is_causal:
            scores = scores.masked_fill(torch.ones(TIME, TIME).triu(1) > 0, -torch.inf)
        outputs = torch.einsum("bts,bsd->btd", scores.softmax(-1), hidden) @ parts[2]
        return F.cross_entropy(outputs.flatten(0, 1), tokens[:, 1:].flatten())

    return loss


NETWORK = [(4, WIDTH), (WIDTH,), (WIDTH, 1)]
ATTENTION = [(WORDS, WIDTH), (WIDTH, WIDTH), (WIDTH, WORDS)]
LAWS = {"rows_do_not_mix", "order_does_not_matter", "future_is_not_seen", "every_parameter_learns", "input_matters"}


def check(loss: Callable[[Weights], Tensor], shapes: list[tuple[int, ...]], out: Path, *, trained: int = 3) -> set[str]:
    """Return the broken laws of a training of the first weights."""
    parts = weights(*shapes)
    optimizer = torch.optim.SGD(parts[:trained], 0.01)
    options = {"laws": {"only": sorted(LAWS), "steps": [3, 5]}}
    model = UnownedTensors(parts[:trained])
    scope = loopscope.attach(model, optimizer, out=out, display="none", hooks=["laws"], hook_options=options)
    with scope:
        for _ in range(7):
            optimizer.zero_grad()
            loss(parts).backward()
            optimizer.step()
        results = {item["law"]: item["verdict"] for item in scope.check()}
    assert results["input_matters"] == "holds"
    return {name for name, verdict in results.items() if verdict == "broken"}


@pytest.mark.longer
@pytest.mark.parametrize(
    ("loss", "shapes", "trained", "law"),
    [
        (network(mixes=True), NETWORK, 3, "rows_do_not_mix"),
        (network(mixes=False), NETWORK, 2, "every_parameter_learns"),
        (attention(is_causal=False), ATTENTION, 3, "future_is_not_seen"),
    ],
    ids=["rows", "optimizer", "future"],
)
def test_wrong_functions_break_laws(loss, shapes, trained: int, law: str, tmp_path: Path) -> None:
    assert law in check(loss, shapes, tmp_path / "run", trained=trained)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("loss", "shapes"),
    [(network(mixes=False), NETWORK), (attention(is_causal=True), ATTENTION)],
    ids=["rows", "future"],
)
def test_right_functions_break_no_law(loss, shapes, tmp_path: Path) -> None:
    assert not check(loss, shapes, tmp_path / "run")


SCRIPT = """
import torch

torch.manual_seed(0)
weights = {"w": torch.randn(4, 1).requires_grad_(), "b": torch.zeros(1).requires_grad_()}
optimizer = torch.optim.SGD(weights.values(), 0.1)
for step in range(12):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    (x @ weights["w"] + weights["b"] - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
print("weights", sum(float(item.detach().double().sum()) for item in weights.values()))
"""


@pytest.mark.slow
@pytest.mark.process
def test_scripts_without_modules_are_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Laws of eval mode and of state dicts are not checked; the weights have the same digits."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    exec(SCRIPT, {})
    expected = capfd.readouterr().out
    assert main(["check", "--json", "--continue", "--", sys.executable, str(path)]) == 0
    shown = capfd.readouterr()
    assert expected in shown.err
    verdicts = {law["law"]: law["verdict"] for law in json.loads(shown.out)["laws"]}
    assert verdicts["rows_do_not_mix"] == verdicts["every_parameter_learns"] == "holds"
    assert verdicts["evaluation_changes_nothing"] == verdicts["checkpoint_is_complete"] == "not checked"
