"""Small low-bit layers and models for the tests, and helpers for their results."""

from collections.abc import Callable

import torch
from loopscope.lowbit import RECIPES, BitLinear, Recipe, find_recipe, quantize_model
from loopscope.lowbit.casts import Cast, Counts, QuantizationListener
from torch import Tensor, nn

NARROW = [name for name in RECIPES if name not in ("fp32", "fp4_metis")]
BLOCK = Cast("e2m1", "block")
STOCHASTIC = find_recipe("e2m1/block/stochastic")
DELAYED = find_recipe("fp8").with_every(rule="delayed")
SHAPES = [(6, 20), (2, 3, 20), (2, 1, 3, 20), (0, 20), (20,)]


def named(recipe: Recipe | str) -> str:
    return recipe if isinstance(recipe, str) else "delayed" if recipe is DELAYED else recipe.name


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(20, 12, bias, dtype=dtype)


def lowbit(recipe: Recipe | str, bias: bool = True, dtype: torch.dtype = torch.float32) -> BitLinear:
    layer = plain(bias, dtype)
    quantize_model(layer, recipe)
    assert isinstance(layer, BitLinear)
    return layer


def results(
    layer: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor] = lambda f, x: f(x)
) -> list[Tensor]:
    """Return output, input gradient and parameter gradients for an output gradient that is no constant."""
    x = x.clone().requires_grad_(True)
    layer.zero_grad()
    y = run(layer, x)
    y.backward(drawn(*y.shape, seed=2, dtype=y.dtype))
    return [y.detach(), x.grad, *[parameter.grad for parameter in layer.parameters() if parameter.requires_grad]]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


class Recorder(QuantizationListener):
    """A listener that counts the casts of each role."""

    def __init__(self, recorded: bool = True) -> None:
        super().__init__(lambda: recorded, {})
        self.roles: list[str] = []
        self.elements = 0

    def record(self, role: str, counts: Counts) -> None:
        self.roles.append(role)
        self.elements += int(counts.by_name()["total_elements"])


def stack(recipe: Recipe | str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 12, bias=False))
    quantize_model(model, recipe, seed=4)
    return model
