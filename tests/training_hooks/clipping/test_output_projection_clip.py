"""Clipping of the output projection's gradient against a reference written out in float64."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import HookPoint
from loopscope.state.digest import described
from loopscope.training_hooks.clipping import (
    ClipOptions,
    EmbeddingProvenance,
    OutputProjectionClip,
    TiedGradientClipping,
)
from loopscope.training_hooks.clipping.output_projection_clip import NormHistory
from torch import Tensor, nn
from torch.nn import functional

from tests.support import Case, Run, SpyHook, at, differences, train
from tests.training_hooks.interrupted import in_one_and_two

TOKENS, WIDTH, STEPS, LR = 11, 6, 8, 0.5
PLAIN = {"window_size": 1, "scale_factor": 1.0}
ROLLING = {"window_size": 3, "scale_factor": 0.2}


class Tied(nn.Module):
    """Embedding, a hidden layer, and the embedding's matrix again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def model() -> Tied:
    torch.manual_seed(0)
    return Tied().double()


def batches(micro: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Draw the micro-batches of every step."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(TOKENS, (STEPS, 2, 12), generator=generator)
    return [list(zip(tokens.chunk(micro), targets.chunk(micro), strict=True)) for tokens, targets in drawn]


class Reference:
    """The rule, written out for two separate matrices that are kept equal."""

    def __init__(self, window_size: int, scale_factor: float, scope: str) -> None:
        self.window, self.scale, self.scope = window_size, scale_factor, scope
        self.history: list[float] = []
        self.weight, self.mix = (parameter.detach().clone() for parameter in model().parameters())
        self.rows: list[dict[str, float]] = []

    def threshold(self) -> float | None:
        last = self.history[-self.window :]
        return self.scale * sum(last) / len(last) if last else None

    def step(self, micro: list[tuple[Tensor, Tensor]]) -> None:
        threshold, norms = self.threshold(), []
        total = [torch.zeros_like(self.weight), torch.zeros_like(self.weight), torch.zeros_like(self.mix)]
        for tokens, targets in micro:
            matrices = [part.clone().requires_grad_() for part in (self.weight, self.weight, self.mix)]
            hidden = torch.tanh(functional.embedding(tokens, matrices[0]) @ matrices[2].T)
            logits = hidden @ matrices[1].T
            loss = functional.cross_entropy(logits, targets) * len(tokens) / 12
            (upstream,) = torch.autograd.grad(loss, logits, retain_graph=True)
            norms.append(float(upstream.norm()))
            if self.scope == "logits" and threshold is not None:
                upstream = upstream * min(1.0, threshold / norms[-1])
            for sum_, part in zip(total, torch.autograd.grad(logits, matrices, upstream), strict=True):
                sum_ += part
        self.apply(total, threshold, norms)

    def apply(self, total: list[Tensor], threshold: float | None, norms: list[float]) -> None:
        g_in, g_out, g_mix = total
        size = float(g_out.norm()) if self.scope == "weight" else sum(norm**2 for norm in norms) ** 0.5
        factor = min(1.0, threshold / size) if threshold is not None and self.scope == "weight" else 1.0
        self.rows.append({"embedding_grad_l2_norm": float(g_in.norm()), "output_proj_grad_l2_norm": size})
        if threshold is not None:
            self.rows[-1] |= {"output_proj_clip_threshold": threshold}
        self.history.append(float(g_in.norm()))
        self.weight -= LR * (g_in + factor * g_out)
        self.mix -= LR * g_mix


def train_plainly(micro: int, *, enabled: bool = True, **options: Any) -> tuple[Tied, list[Mapping[str, Tensor]]]:
    """Train in a custom loop with the plain class."""
    tied, rows = model(), []
    clipping = TiedGradientClipping(tied, ClipOptions(**options))
    if enabled:
        clipping.enable()
    optimizer = torch.optim.SGD(tied.parameters(), lr=LR)
    for step in batches(micro):
        optimizer.zero_grad()
        for tokens, targets in step:
            (functional.cross_entropy(tied(tokens), targets) * len(tokens) / 12).backward()
        rows.append(clipping.clip())
        optimizer.step()
    return tied, rows


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("scope", ["weight", "logits"])
@pytest.mark.parametrize("options", [PLAIN, ROLLING], ids=["previous", "rolling"])
def test_clipped_training_matches_the_reference(options: dict[str, Any], scope: str, micro: int) -> None:
    reference = Reference(**options, scope=scope)
    for step in batches(micro):
        reference.step(step)
    tied, rows = train_plainly(micro, **options, scope=scope)
    torch.testing.assert_close(tied.embedding.weight.detach(), reference.weight, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tied.mix.weight.detach(), reference.mix, rtol=1e-10, atol=1e-12)
    for expected, found in zip(reference.rows, rows, strict=True):
        assert {name: float(found[name]) for name in expected} == pytest.approx(expected, rel=1e-9)
    assert any(float(row["clipped_fraction"]) > 0 for row in rows) or options is PLAIN
    assert "output_proj_clip_threshold" not in rows[0]


def test_disabled_clipping_keeps_gradients() -> None:
    off, rows = train_plainly(1, enabled=False, **PLAIN)
    unclipped, _ = train_plainly(1, window_size=1, scale_factor=1e6)
    assert rows == [{}] * STEPS
    assert torch.equal(off.embedding.weight, unclipped.embedding.weight)


def train_clipped(case: Case, **options: Any) -> Run:
    return train(case, [OutputProjectionClip(**options)], steps=6)


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("scope", ["weight", "logits"])
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_only_declared_gradients_change(loop: str, scope: str) -> None:
    grads: dict[bool, list[dict[str, Tensor]]] = {True: [], False: []}
    for active in grads:
        look = at(SpyHook, HookPoint.PRE_UPDATE)(lambda ctx, seen=grads[active]: seen.append(
            {name: parameter.grad.clone() for name, parameter in ctx.model.named_parameters()}))  # fmt: skip
        hooks = [OutputProjectionClip(window_size=1, scale_factor=0.01, scope=scope)] if active else []
        train(Case("tied", "sgd_momentum", loop), [*hooks, look], steps=2)
    first, second, *_ = zip(grads[True], grads[False], strict=True)
    assert all(torch.equal(first[0][name], first[1][name]) for name in first[0])
    changed = {name for name in second[0] if not torch.allclose(second[0][name], second[1][name], rtol=1e-3, atol=0)}
    assert "embedding.weight" in changed


def test_each_step_has_one_clipping_decision() -> None:
    """The number of micro-batches does not matter."""
    whole, pieces = (
        train(Case("tied"), [OutputProjectionClip(**ROLLING)], steps=3, accumulation_steps=count) for count in (1, 3)
    )
    rows = [run.sink.rows("output_projection_clip/clipped_fraction") for run in (whole, pieces)]
    assert [len(found) for found in rows] == [3, 3]
    assert {value for found in rows for *_, value in found} <= {0.0, 1.0}


def test_provenance_measures_the_unclipped_gradient() -> None:
    """Both hooks report the same norm of the output projection's gradient."""
    run = train(Case("tied"), [EmbeddingProvenance(), OutputProjectionClip(**PLAIN)], steps=3)
    names = [f"{hook}/output_proj_grad_l2_norm" for hook in ("embedding_provenance", "output_projection_clip")]
    seen, clipped = ([value for *_, value in run.sink.rows(name)] for name in names)
    assert seen == pytest.approx(clipped, rel=1e-6)


def test_norm_history_resumes_within_a_window() -> None:
    """The restored history has the same mean after each norm, including an infinite one."""
    history, resumed = NormHistory(3), NormHistory(3)
    for norm in (1.0, 2.0):
        history.add(torch.tensor(norm))
    resumed.load_state_dict(history.state_dict())
    for norm in (float("inf"), 6.0, 7.0):
        for each in (history, resumed):
            each.add(torch.tensor(norm))
        assert torch.equal(history.mean, resumed.mean)
    assert history.mean == 5.0


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("scope", ["weight", "logits"])
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_resumed_run_matches_uninterrupted_run(loop: str, scope: str, tmp_path: Path) -> None:
    """The run stops in the middle of a window, for both loops and scopes."""
    one, two, middle = in_one_and_two(
        Case("tied", loop=loop), lambda: OutputProjectionClip(window_size=9, scale_factor=0.2, scope=scope), tmp_path
    )
    assert not differences(one.final, two.final)
    assert described(two.rows) == described(one.after(middle)) != "[]"


def test_an_untied_model_is_refused_with_the_names() -> None:
    with pytest.raises(UnsuitableError, match="embedding and decoder have a matrix each; tie their weights"):
        train_clipped(Case("transformer"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window_size": 0}, "window_size is 0; it must be at least 1"),
        ({"scale_factor": 0.0}, "scale_factor is 0.0; it must be positive"),
        ({"scope": "loss"}, "scope is 'loss'; it is one of weight, logits"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        OutputProjectionClip(**options)


def test_a_history_of_another_window_is_refused() -> None:
    with pytest.raises(UsageError, match="a window of 3 steps, but window_size is 5"):
        NormHistory(5).load_state_dict({"norms": torch.zeros(3)})
