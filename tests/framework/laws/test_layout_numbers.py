"""``loopscope equal --numbers``: gradients and updates of two layouts, and what rounding changes."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope.cli import main
from loopscope.cli.equal_numbers import FILE, Comparison, Key, TensorDifference, differences_of
from torch import Tensor, nn

Layout = Callable[[nn.Module, Tensor, Tensor], Iterator[Tensor]]


def errors_of(model: nn.Module, inputs: Tensor, mask: Tensor) -> Tensor:
    return ((model(inputs)[:, 0] - inputs.sum(1)).float().square() * mask).sum()


def whole(model: nn.Module, inputs: Tensor, mask: Tensor) -> Iterator[Tensor]:
    yield errors_of(model, inputs, mask) / mask.sum()


def other_order(model: nn.Module, inputs: Tensor, mask: Tensor) -> Iterator[Tensor]:
    yield errors_of(model, inputs.flip(0), mask.flip(0)) / mask.sum()


def accumulated(model: nn.Module, inputs: Tensor, mask: Tensor) -> Iterator[Tensor]:
    for rows, part in zip(inputs.chunk(4), mask.chunk(4), strict=True):
        yield errors_of(model, rows, part) / mask.sum()


def mean_of_means(model: nn.Module, inputs: Tensor, mask: Tensor) -> Iterator[Tensor]:
    for rows, part in zip(inputs.chunk(4), mask.chunk(4), strict=True):
        yield errors_of(model, rows, part) / part.sum() / 4


def trained(
    folder: Path,
    layout: Layout = whole,
    rate: float = 0.01,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    **moved: object,
) -> dict[str, object]:
    """Train two steps, with the hooks that ``moved`` gives options to, and return what was written."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    options = {"layout_numbers": {}, **moved}
    settings = {"hooks": [*options], "hook_options": options, "budget": None, "display": "none", "loop": "step"}
    with loopscope.attach(model, optimizer, out=folder, **settings):
        for _ in range(2):
            inputs, mask = torch.randn(24, 8).to(dtype), (torch.rand(24) < 0.6).to(dtype)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                for loss in layout(model, inputs, mask):
                    loss.backward()
            optimizer.step()
    return dict(json.loads((folder / FILE).read_text()))


def compared(folder: Path, layout: Layout, rate: float = 0.01, **settings: object) -> dict[str, object]:
    """Compare a layout with the whole batch, as the command does, with three moves of the weights."""
    precision = trained(folder / "a", **settings)["precision"]
    other = {"layout_numbers": {"reference": str(folder / "a")}}
    comparison = Comparison(differences_of(trained(folder / "b", layout, rate, **settings, **other), "b"))
    for move in range(3):
        options = {**other, "moved_weights": {"seed": move, "precision": precision}}
        comparison.moved.append(differences_of(trained(folder / str(move), **settings, **options), "a"))
    return comparison.answer()


@pytest.mark.some_rows(2)
@pytest.mark.longer
@pytest.mark.parametrize("layout", [accumulated, other_order])
def test_right_layouts_are_equal(layout: Layout, tmp_path: Path) -> None:
    answer = compared(tmp_path, layout)
    assert (answer["answer"], answer["same_bits"], answer["compared"]) == ("equal", False, 20)


@pytest.mark.longer
def test_mean_of_means_differs_at_once(tmp_path: Path) -> None:
    """The masks of micro-batches have different sums, which is visible in bfloat16, too."""
    answer = compared(tmp_path, mean_of_means, autocast=True)
    assert (answer["answer"], answer["first"]["step"], answer["first"]["kind"]) == ("differ", 1, "gradient")
    assert answer["first"]["distance"] > 3 * answer["first"]["noise"] > 0


@pytest.mark.slow
def test_learning_rate_is_found_in_float32_only(tmp_path: Path) -> None:
    """Rounding hides 1 % of it in bfloat16, which the answer does not take for equality."""
    answer = compared(tmp_path / "float32", whole, 0.0101)
    assert (answer["answer"], answer["first"]["step"], answer["first"]["kind"]) == ("differ", 1, "update")
    answer = compared(tmp_path / "bfloat16", whole, 0.0101, dtype=torch.bfloat16)
    assert answer["answer"] == "undecided"
    assert answer["visible"]["update"] > 0.01
    assert compared(tmp_path / "accumulated", accumulated, dtype=torch.bfloat16)["answer"] == "undecided"


def test_first_difference_beyond_the_noise_is_named() -> None:
    """Of the tensors at the first step with one, it is that with the largest multiple; not a number is a difference."""
    keys = [Key(1, "gradient", "a"), Key(2, "gradient", "a"), Key(2, "gradient", "b"), Key(2, "update", "a")]
    noise = dict.fromkeys(keys, TensorDifference(1e-3, 1.0, 1e-6))
    distances = [2.9e-3, 3.1e-3, 9e-3, float("nan")]
    found = {key: TensorDifference(distance, 1.0, 1e-6) for key, distance in zip(keys, distances, strict=True)}
    answer = Comparison(found, moved=[noise]).answer()
    assert (answer["first"]["step"], answer["first"]["tensor"], answer["others"]) == (2, "b", 1)
    assert Comparison(found).beyond() == keys
    assert [Comparison(found, moved=[noise] * number).is_clear for number in (1, 6)] == [False, False]
    far = {keys[0]: TensorDifference(1.0, 1.0, 1e-6)}
    assert [Comparison(far, moved=[noise] * number).is_clear for number in (1, 2)] == [False, True]
    small = {keys[0]: TensorDifference(9e-5, 1.0, 1e-6), keys[3]: TensorDifference(0.0, 1.0, 1e-6)}
    assert Comparison(small).answer()["answer"] == "equal"
    assert Comparison(small, unmatched=["c"]).answer()["answer"] == "undecided"


REFUSED = {
    "equal --steps 3 'python a.py' 'python b.py'": "--steps needs --numbers",
    "equal --numbers --metric loss 'python a.py' 'python b.py'": "takes no --metric; leave it out",
    "equal --numbers 'python a.py'": "takes two commands or two folders, each in quotes, but got 1",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_comparisons_are_refused(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(words)) == 2
    assert REFUSED[words] in capfd.readouterr().err


TRAINING = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), float(sys.argv[1]))
for _ in range(30):
    inputs = torch.randn(16, 4)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.process
def test_commands_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A command equals itself bit for bit; with another learning rate, the first update differs."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINING)
    command = f"{sys.executable} train.py"
    assert main(["equal", "--numbers", "--steps", "2", f"{command} 0.1", f"{command} 0.1"]) == 0
    assert "A and B compute the same, bit for bit, in 10 gradients" in capfd.readouterr().out
    assert main(["equal", "--numbers", "--steps", "1", f"{command} 0.1", f"{command} 0.101"]) == 1
    assert "B differs from A at step 1: the updates of" in capfd.readouterr().out
    assert not list(tmp_path.rglob("*.pt"))
