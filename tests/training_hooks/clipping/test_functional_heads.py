"""Functional heads, matrices that only look like heads, and their detection from the model's output."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import LoopscopeError, RunNotice, UnsuitableError, UsageError
from loopscope.loops import step_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import ObservedPass, TrainingTask
from loopscope.training_hooks.clipping import (
    ClipOptions,
    EmbeddingProvenance,
    OutputProjectionClip,
    TiedGradientClipping,
)
from loopscope.training_hooks.clipping.tied_embeddings import EmbeddingPair
from torch import Tensor, nn
from torch.nn import functional

from tests.support import RecordingSink

TOKENS, WIDTH, ROWS = 11, 6, 12


class Model(nn.Module):
    """Embedding, a hidden layer with as many units as there are tokens, and a head of some kind."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.kind = head
        self.wte = nn.Embedding(TOKENS, WIDTH)
        self.up = nn.Linear(WIDTH, TOKENS)  # the decoy: its weight has the embedding's shape
        self.down = nn.Linear(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        if head in ("module", "untied", "module unused", "separate"):
            self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        if head in ("module", "module unused"):
            self.lm_head.weight = self.wte.weight
        if head == "separate":
            self.other = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        hidden = self.norm(x + self.down(torch.tanh(self.up(x))))
        if self.kind in ("module", "untied"):
            return self.lm_head(hidden)
        if self.kind == "separate":
            return functional.linear(hidden, self.other)
        if self.kind == "hidden":
            return hidden
        if self.kind == "matmul":
            return 0.5 * torch.tanh(hidden @ self.wte.weight.T / 3.0)
        return functional.linear(hidden, self.wte.weight)


def model(head: str, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    made = Model(head)
    with torch.no_grad():
        made.wte.weight.copy_(torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(5)))
    return made.to(dtype)


def data() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(TOKENS, (2, 4 * ROWS), generator=torch.Generator().manual_seed(2))
    return drawn[0], drawn[1]


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    logits = net(tokens)
    logits = logits if net.kind != "hidden" else functional.linear(logits, net.wte.weight)
    return functional.cross_entropy(logits.float() if logits.dtype is torch.bfloat16 else logits, targets)


def both_gradients(net: Model, batch: tuple[Tensor, Tensor], micro: int = 1) -> tuple[Tensor, Tensor]:
    """Compute g_in and g_out by brute force: a separate matrix for each product, summed in float32 or wider."""
    total: list[Any] = [0, 0]
    for tokens, targets in zip(batch[0].chunk(micro), batch[1].chunk(micro), strict=True):
        parts = [net.wte.weight.detach().clone().requires_grad_() for _ in range(2)]
        x = functional.embedding(tokens, parts[0])
        hidden = net.norm(x + net.down(torch.tanh(net.up(x))))
        logits = functional.linear(hidden, parts[1])
        if net.kind == "matmul":
            logits = 0.5 * torch.tanh(hidden @ parts[1].T / 3.0)
        logits = logits.float() if logits.dtype is torch.bfloat16 else logits
        loss = functional.cross_entropy(logits, targets) * (len(tokens) / len(batch[0]))
        found = torch.autograd.grad(loss, parts)
        total = [
            each + (part.float() if part.dtype is torch.bfloat16 else part)
            for each, part in zip(total, found, strict=True)
        ]
    return total[0], total[1]


def run(
    net: nn.Module,
    hooks: list[Any],
    *,
    change: Callable[[TrainingTask], None] = lambda task: None,
    required: tuple[str, ...] | None = None,
    **settings: Any,
) -> tuple[dict[str, float], list[str], Any]:
    """Train a step; return the metrics of the first hook, what was said, and the digest of the weights."""
    loader = TensorLoader(data(), ROWS, fixed_order(torch.arange(4 * ROWS)))
    task = TrainingTask(net, torch.optim.SGD(net.parameters(), lr=0.1), loader, loss_of, length=1, **settings)
    change(task)
    state, sink = TrainingState(net, task.optimizer, RandomStreams(7)), RecordingSink()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        manager = HookManager(hooks, task, state, loop="step", sinks=[sink], audit=True, required=required)
        step_loop(task, manager)
        manager.end("completed")
    values = {name.split("/")[1]: value for name, _, _, value in sink.rows("") if "/" in name}
    weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return values, [str(each.message) for each in said if issubclass(each.category, RunNotice)], weights


def first_batch() -> tuple[Tensor, Tensor]:
    return tuple(part[:ROWS] for part in data())


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("head", ["module", "module unused", "functional", "matmul"])
def test_every_tied_head_kind_is_measured_exactly(head: str, micro: int) -> None:
    """The head is found next to a decoy of the same shape; gradient norms and cosine match brute force."""
    g_in, g_out = both_gradients(model(head), first_batch(), micro)
    found, said, _ = run(model(head), [EmbeddingProvenance()], accumulation_steps=micro)
    assert found["embedding_grad_l2_norm"] == pytest.approx(g_in.norm().item(), rel=1e-9)
    assert found["output_proj_grad_l2_norm"] == pytest.approx(g_out.norm().item(), rel=1e-9)
    cosine = (g_in * g_out).sum() / g_in.norm() / g_out.norm()
    assert found["cosine"] == pytest.approx(cosine.item(), rel=1e-8)
    named = "output projection 'lm_head'" if head == "module" else "a functional head"
    assert f"embedding_provenance uses embedding 'wte' and {named}, tied (one matrix)." in said


def test_untied_head_is_found_next_to_decoy() -> None:
    """The notice names the module of the head and reports separate matrices."""
    _, said, _ = run(model("untied"), [EmbeddingProvenance()])
    assert "embedding_provenance uses embedding 'wte' and output projection 'lm_head', untied (two matrices)." in said


@pytest.mark.longer
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("hook", [EmbeddingProvenance, OutputProjectionClip])
def test_functional_head_run_matches_bare_run(hook: type[Any]) -> None:
    """The weights have the same bytes while nothing is clipped, in float64 and under bfloat16 autocast."""

    def autocast(task: TrainingTask) -> None:
        task.compute_loss = lambda net, batch: torch.autocast("cpu", torch.bfloat16)(loss_of)(net, batch)

    for dtype, change in ((torch.float64, lambda task: None), (torch.float32, autocast)):
        plain, hooked = (run(model("functional", dtype), hooks, change=change)[2] for hooks in ([], [hook()]))
        assert all(torch.equal(plain[name], hooked[name]) for name in plain)


@pytest.mark.compile
@pytest.mark.parametrize("hook", [EmbeddingProvenance, OutputProjectionClip])
def test_compiled_functional_heads_are_read_and_clipped(hook: type[Any]) -> None:
    """The graph of the whole model contains the taps; parts that are compiled hide the uses of the matrix."""
    expected, _, _ = run(model("functional"), [hook()])
    net = model("functional")
    net.compile(backend="aot_eager", dynamic=False)
    found, _, _ = run(net, [hook()])
    assert found == pytest.approx(expected, rel=1e-6)
    net = model("functional")
    net.up.compile(backend="eager")
    with pytest.raises(UsageError, match="make the head a module"):
        run(net, [hook()])


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("head", ["module", "functional"])
def test_bfloat16_micro_batches_are_summed_in_float32(head: str, micro: int) -> None:
    """The gradient norms match brute force for module heads and functional heads."""
    net = model(head, torch.bfloat16)
    g_in, g_out = both_gradients(net, first_batch(), micro)
    found, _, _ = run(net, [EmbeddingProvenance()], accumulation_steps=micro)
    assert found["embedding_grad_l2_norm"] == pytest.approx(g_in.norm().item(), rel=1e-6)
    assert found["output_proj_grad_l2_norm"] == pytest.approx(g_out.norm().item(), rel=1e-6)


def test_bfloat16_weights_are_clipped_in_custom_loop() -> None:
    """The clipped gradient of three micro-batches follows the rule within two percent."""
    net = model("functional", torch.bfloat16)
    clipping = TiedGradientClipping(net, ClipOptions(window_size=1, scale_factor=0.1))
    clipping.enable()
    for _ in range(2):
        net.zero_grad()
        for part in zip(*(each.chunk(3) for each in first_batch()), strict=True):
            (loss_of(net, part) / 3).backward()
        whole = net.wte.weight.grad.float()
        found = clipping.clip()
    g_in, g_out = both_gradients(net, first_batch(), 3)
    expected = g_in + 0.1 * g_in.norm() / g_out.norm() * g_out
    assert float(found["clipped_fraction"]) == 1
    assert (net.wte.weight.grad.float() - expected).norm() < 0.02 * expected.norm() < (whole - expected).norm()


def test_a_functional_head_is_clipped_by_the_rule() -> None:
    net = model("functional")
    clipping = TiedGradientClipping(net, ClipOptions(window_size=1, scale_factor=0.3))
    clipping.enable()
    for _ in range(2):
        net.zero_grad()
        loss_of(net, first_batch()).backward()
        clipping.clip()
    clipping.disable()
    g_in, g_out = both_gradients(net, first_batch())
    expected = g_in + min(1.0, float(0.3 * g_in.norm() / g_out.norm())) * g_out
    torch.testing.assert_close(net.wte.weight.grad, expected, rtol=1e-10, atol=1e-12)


# Refusals


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("hook", [EmbeddingProvenance, OutputProjectionClip])
@pytest.mark.parametrize(
    ("head", "options", "error", "sentence"),
    [
        ("functional", {"embedding": "wte", "projection": "wte"}, UsageError, "are both 'wte'; name two modules"),
        (
            "functional",
            {"embedding": "wte", "projection": "up"},
            UnsuitableError,
            "does not produce the model's output from 'wte'",
        ),
        (
            "module unused",
            {"embedding": "wte", "projection": "lm_head"},
            UnsuitableError,
            "it does not produce the model",
        ),
        ("separate", {}, UnsuitableError, "the model has none"),
        ("hidden", {}, UnsuitableError, "the model has none"),
        ("functional", {"embedding": "wte", "projection": "head"}, UsageError, "no module of that name with a weight"),
    ],
)
def test_wrong_projection_is_refused(hook, head, options, error, sentence) -> None:
    """The error is at most 300 characters long; a hook that is not required is left out with a notice."""
    with pytest.raises(error, match=sentence) as refusal:
        run(model(head), [hook(**options)])
    assert len(str(refusal.value)) <= 300
    if error is UnsuitableError:
        _, said, _ = run(model(head), [hook(**options)], required=())
        assert any(each.startswith("Left out: ") for each in said)


def test_logits_of_a_functional_head_are_not_scaled() -> None:
    with pytest.raises(UnsuitableError, match=r"choose scope=weight, or make the head an nn\.Linear"):
        run(model("functional"), [OutputProjectionClip(scope="logits")])


class InLoss(Model):
    """A model whose head is called by the loss."""

    def __init__(self) -> None:
        super().__init__("hidden")
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.lm_head.weight = self.wte.weight


def test_module_head_called_by_loss_is_found() -> None:
    """The gradient norms match brute force; a functional head is refused if the loss calls model.forward directly."""

    def in_loss(task: TrainingTask) -> None:
        task.compute_loss = lambda net, batch: functional.cross_entropy(net.lm_head(net(batch[0])), batch[1])

    def in_pieces(task: TrainingTask) -> None:
        task.compute_loss = lambda net, batch: functional.cross_entropy(net.forward(batch[0]), batch[1])

    net = InLoss().double()
    g_in, g_out = both_gradients(net, first_batch())
    found, _, _ = run(net, [EmbeddingProvenance()], change=in_loss)
    assert found["embedding_grad_l2_norm"] == pytest.approx(g_in.norm().item(), rel=1e-9)
    assert found["output_proj_grad_l2_norm"] == pytest.approx(g_out.norm().item(), rel=1e-9)
    with pytest.raises(UnsuitableError, match="the model has none"):
        run(model("functional"), [EmbeddingProvenance()], change=in_pieces)


def test_loss_error_passes_through_unchanged() -> None:
    """The exception of the loss function reaches the caller with its original message."""

    def broken(task: TrainingTask) -> None:
        def compute_loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            raise ValueError("no such loss")

        task.compute_loss = compute_loss

    with pytest.raises(ValueError, match=r"^no such loss$"):
        run(model("module"), [EmbeddingProvenance()], change=broken)


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (
            "module unused",
            r"should clip embedding 'wte' and output projection 'lm_head', tied \(one matrix\), but the model's output",
        ),
        ("untied", "wte and lm_head have a matrix each"),
        ("hidden", "the model has none"),
    ],
)
def test_custom_loop_refuses_wrong_pair_at_first_pass(head: str, sentence: str) -> None:
    """A forward pass under torch.no_grad() is not checked; the first pass with gradients raises."""
    net = model(head)
    clipping = TiedGradientClipping(net)
    clipping.enable()
    with torch.no_grad():
        net(first_batch()[0])  # shows nothing
    with pytest.raises(LoopscopeError, match=sentence):
        loss_of(net, first_batch())
    clipping.disable()


def test_pass_records_products_nearest_to_output() -> None:
    """A scaling and log_softmax after the head and an unrelated penalty do not hide the head."""
    net, seen = model("functional"), ObservedPass()
    net.scale = nn.Parameter(torch.ones(1, 1).double())
    plain = net.forward
    net.forward = lambda tokens: {
        "logits": (plain(tokens) * net.scale).log_softmax(-1),
        "penalty": net.up.weight.square().sum(),
    }
    with seen.observe(net):
        net(first_batch()[0])
    net(first_batch()[0])
    assert [matrix is net.wte.weight for matrix in seen.of_output] == [True]
    assert {"", "wte", "up", "down"} <= seen.called
    assert EmbeddingPair.of(net, "any", None, None, seen) == EmbeddingPair("wte", "", tied=True)
