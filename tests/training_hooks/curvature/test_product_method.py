"""Exact Hessian-vector products where they are correct, and finite differences where they fail or are wrong."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import loopscope
import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.errors import HookError
from loopscope.hooks import HookPoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector, parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.support import ActingHook, at
from tests.support.cases import FEW_PASSES

pytestmark = pytest.mark.filterwarnings(
    "ignore::loopscope.hooks.Alert", "ignore::FutureWarning", "always::loopscope.errors.RunNotice"
)
ACTING: Any = at(ActingHook, HookPoint.PRE_STEP, needs_loss=True, needs_pre_epoch_state=False)
SIZE, CLASSES = 4, 3


class Attention(nn.Module):
    """Attention through the fused operator, after a checkpointed or plain layer."""

    def __init__(self, layer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.layer = nn.Linear(SIZE, 3 * SIZE), layer
        self.norm, self.head = nn.BatchNorm1d(SIZE), nn.Linear(SIZE, CLASSES)

    def attend(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(1) * torch.arange(1.0, 4.0, dtype=x.dtype).view(1, 3, 1)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # reentrant checkpointing needs an input with a gradient
        return self.head(torch.tanh(self.norm(self.layer(self.attend, x))))


def plain(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return function(*inputs)


def flash(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call a function with the kernel that has no second derivative."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return function(*inputs)


class Fused(torch.autograd.Function):
    """A cross-entropy that saves its gradient in the forward pass, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        gradient = logits.softmax(-1) - functional.one_hot(targets, logits.shape[-1])
        ctx.save_for_backward(gradient / len(logits))
        return functional.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return outputs[0] * ctx.saved_tensors[0], None


class Once(Fused):
    """A fused cross-entropy that declares that it has no second derivative."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return outputs[0] * ctx.saved_tensors[0], None


def network(*, layer: Callable[[nn.Module], nn.Module] = lambda module: module, act: Any = nn.Tanh) -> nn.Module:
    return nn.Sequential(layer(nn.Linear(SIZE, 8)), act(), layer(nn.Linear(8, 8)), act(), nn.Linear(8, CLASSES))


def entropy(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Any = functional.cross_entropy) -> Tensor:
    return loss(model(batch[0]), batch[1])


def in_bfloat16(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Any = functional.cross_entropy) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return entropy(model, batch, loss)


Make = Callable[[], nn.Module]
EXACT: dict[str, tuple[Make, Any]] = {
    "tanh": (network, entropy),
    "relu": (lambda: network(act=nn.ReLU), entropy),
    "bfloat16": (network, in_bfloat16),
    "parameters in bfloat16": (lambda: network().bfloat16(), in_bfloat16),
    "attention": (lambda: Attention(plain), entropy),
    "checkpointing": (lambda: Attention(partial(checkpoint, use_reentrant=False)), entropy),
    "spectral norm": (lambda: network(layer=parametrizations.spectral_norm), entropy),
    "householder": (
        lambda: network(layer=lambda layer: parametrizations.orthogonal(layer, orthogonal_map="householder")),
        entropy,
    ),
    "matrix exponential": (lambda: network(layer=parametrizations.orthogonal), entropy),
}
FAILS, WRONG = "exact products raise", "torch's second derivatives are wrong"
INEXACT: dict[str, tuple[Make, Any, str]] = {
    "weight norm": (lambda: network(layer=parametrizations.weight_norm), entropy, WRONG),
    "old weight norm": (lambda: network(layer=nn.utils.weight_norm), entropy, WRONG),
    "fused loss": (network, partial(entropy, loss=Fused.apply), WRONG),
    "fused loss after relu": (lambda: network(act=nn.ReLU), partial(entropy, loss=Fused.apply), WRONG),
    "fused loss in bfloat16": (network, partial(in_bfloat16, loss=Fused.apply), WRONG),
    "fused loss of a linear model": (lambda: nn.Linear(SIZE, CLASSES), partial(entropy, loss=Fused.apply), WRONG),
    "once differentiable": (network, partial(entropy, loss=Once.apply), WRONG),
    "flash attention": (lambda: Attention(flash), entropy, FAILS),
    "reentrant checkpointing": (lambda: Attention(partial(checkpoint, use_reentrant=True)), entropy, WRONG),
}


def train(make: Make, loss: Any, *, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, nn.Module]:
    """Train three steps; return the scope and the model."""
    torch.manual_seed(0)
    model = make() if dtype == torch.float32 else make().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs = torch.randn(24, SIZE).to(dtype)
    loader = DataLoader([*zip(inputs, torch.randint(CLASSES, (24,)), strict=True)], batch_size=8)
    given = {"loss": loss, "loader": loader, "display": "none", "overwrite": True} | options
    with loopscope.attach(model, optimizer, **given) as scope:
        for batch in scope.batches(loader):
            scope.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return scope, model


def run_with(
    hook: str, make: Make, loss: Any, out: Any, *, method: str = "auto", **more: Any
) -> tuple[dict[str, Any], nn.Module]:
    """Train with a hook; return its last metrics and the model."""
    options = {hook: FEW_PASSES[hook] | {"method": method} | ({"burst_length": 3} if hook == "hessian" else {})}
    scope, model = train(make, loss, hooks=[hook], hook_options=options, out=out, **{"display": "normal", **more})
    return scope.last_metrics(), model


def sentences(capsys: Any) -> list[str]:
    """Return the printed sentences on the method."""
    return re.findall("Hook '[a-z]*' measures curvature by .*?[.] ", " ".join(capsys.readouterr().out.split()) + " ")


@pytest.mark.some_rows(3)
@pytest.mark.longer
@pytest.mark.parametrize("hook", ["hessian", "sharpness"])
@pytest.mark.parametrize("name", EXACT)
def test_correct_products_stay_exact(name: str, hook: str, tmp_path: Any, capsys: Any) -> None:
    metrics, _ = run_with(hook, *EXACT[name], tmp_path)
    assert not sentences(capsys)
    assert metrics[f"{hook}/exact_products"] == 1


@pytest.mark.some_rows(3)
@pytest.mark.longer
@pytest.mark.parametrize("hook", ["hessian", "sharpness"])
@pytest.mark.parametrize("name", INEXACT)
def test_finite_differences_replace_inexact_products(name: str, hook: str, tmp_path: Any, capsys: Any) -> None:
    make, loss, reason = INEXACT[name]
    metrics, model = run_with(hook, make, loss, tmp_path)
    notices = sentences(capsys)
    assert len(notices) == 1
    assert f"Hook '{hook}' measures curvature by finite differences of step 0.01, since " in notices[0]
    assert reason in notices[0]
    assert metrics[f"{hook}/exact_products"] == 0
    bare = train(make, loss, hooks=[], out=tmp_path / "bare")[1]
    assert torch.equal(parameters_to_vector(model.parameters()), parameters_to_vector(bare.parameters()))


@pytest.mark.parametrize("name", ["weight norm", "fused loss", "once differentiable"])
def test_inexact_products_are_refused_by_name(name: str, tmp_path: Any) -> None:
    make, loss, reason = INEXACT[name]
    sentence = f"Hook 'hessian' has method='exact', but .*{reason}.*; set hessian.method to 'auto' or"
    with pytest.raises(HookError, match=sentence):
        run_with("hessian", make, loss, tmp_path, method="exact", display="none", on_hook_error="raise")


def products(make: Make, loss: Any, dtype: torch.dtype, method: str, out: Any) -> Tensor:
    """Return H g of the first batch, flat in float64."""
    flat = []

    def act(run_ctx: Any, model_ctx: Any) -> None:
        gradient = model_ctx.compute_batch_gradients()
        product = model_ctx.hessian_vector_product(gradient, method=method, epsilon=1e-2)
        flat.append(torch.cat([product[name].flatten() for name in product]).double())

    train(make, loss, dtype=dtype, hooks=[ACTING(act)], out=out)
    return flat[0]


@pytest.mark.longer
@pytest.mark.parametrize("name", ["fused loss", "once differentiable", "reentrant checkpointing"])
def test_finite_differences_match_closed_form(name: str, tmp_path: Any) -> None:
    make, loss, _ = INEXACT[name]
    true_make = (lambda: Attention(plain)) if "checkpointing" in name else make
    expected = products(true_make, entropy, torch.float64, "exact", tmp_path)
    measured = products(make, loss, torch.float32, "finite_difference", tmp_path)
    assert (measured - expected).norm() < 1e-3 * expected.norm()


class Softmax(nn.Module):
    """A linear classifier, whose Hessian has a closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, SIZE * CLASSES).view(CLASSES, SIZE).float())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def test_product_of_classifier_matches_formula(tmp_path: Any) -> None:
    """H = mean of (diag(p) − p pᵀ) ⊗ x xᵀ for softmax probabilities p."""
    pairs = []

    def act(run_ctx: Any, model_ctx: Any) -> None:
        (x, _), weight = run_ctx.batch_data, model_ctx.model.weight.detach().double()
        vector = torch.linspace(1, -2, SIZE * CLASSES).view(CLASSES, SIZE)
        p = (x.detach().double() @ weight.T).softmax(1)
        kernel = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        full = torch.einsum("bcd,bi,bj->cidj", kernel, x.detach().double(), x.detach().double()) / len(x)
        expected = torch.einsum("cidj,dj->ci", full, vector.double())
        pairs.append((model_ctx.hessian_vector_product({"weight": vector}, method="finite_difference"), expected))

    train(Softmax, partial(entropy, loss=Once.apply), hooks=[ACTING(act)], out=tmp_path)
    for product, expected in pairs:
        assert torch.allclose(product["weight"].double(), expected, rtol=1e-3, atol=1e-4)
