"""Attention taps: they read every attention of the training passes, once, and have no other effects."""

import math
import random
from functools import partial

import pytest
import torch
from loopscope.errors import StateMutationError, UsageError
from loopscope.hooks import (
    AttentionCall,
    AttentionTap,
    ForwardTap,
    FusedCall,
    HookPoint,
    TapOwner,
    TrainingHook,
    WrittenCall,
)
from loopscope.taps import TapSet
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support import Case, bare_run, differences, train

HEADS, WIDTH = 2, 8
LAYER = "blocks.0.attention"
CASE = Case("transformer", loop="step")


class Written(nn.Module):
    """Handwritten attention; ``change`` maps scores and values to the mixed values."""

    def __init__(self, change) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (by_head(part(x)) for part in (self.query, self.key, self.value))
        return self.change(query, key, value).transpose(1, 2).flatten(2)


def by_head(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def scaled(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled(query, key).softmax(-1) @ value


def shifted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scaled(query, key)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ value


def shifted_in_place(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.matmul(query, key.mT)
    scores *= query.shape[-1] ** -0.5
    scores -= scores.max(dim=-1, keepdim=True).values.detach()
    return torch.softmax(scores, dim=-1) @ value


def with_sink(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = scaled(query, key)
    scores = torch.cat([scores, torch.full_like(scores[..., :1], 4.0)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return functional.softmax(scores, dim=-1)[..., :-1] @ value


def capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (torch.tanh(scaled(query, key) / 0.5) * 0.5).softmax(-1) @ value


def folded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute with batch and heads in one dimension."""
    first, second = query.flatten(0, 1), key.flatten(0, 1)
    empty = first.new_empty(len(first), first.shape[1], second.shape[1])
    scores = torch.baddbmm(empty, first, second.mT, beta=0, alpha=query.shape[-1] ** -0.5)
    return scores.view(*query.shape[:3], -1).softmax(dim=-1) @ value


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


WAYS = [plain, shifted, shifted_in_place, with_sink, capped, folded, fused]


def tokens() -> Tensor:
    return 3 * torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def attach(model: nn.Module, *targets: str) -> list[tuple[str, AttentionCall]]:
    """Attach a tap to every target, and return the list to which they append their calls."""
    calls: list[tuple[str, AttentionCall]] = []
    owner = TapOwner("reader", lambda: True, lambda target, function: function(), False)
    taps = [AttentionTap(target, lambda call, target=target: calls.append((target, call))) for target in targets]
    TapSet(model).attach(owner, taps)
    return calls


def joined(call: AttentionCall, part: str) -> Tensor:
    return torch.cat([getattr(block, part) for block in call.blocks()])


@pytest.mark.parametrize("way", WAYS)
def test_scores_match_products_of_projections(way):
    """Scores are read before a shift and without sinks; products are those before a soft cap."""
    torch.manual_seed(0)
    model = Written(way)
    calls = attach(model, "")
    model(tokens()).sum().backward()
    ((_, call),) = calls
    with torch.no_grad():
        expected = scaled(by_head(model.query(tokens())), by_head(model.key(tokens())))
    torch.testing.assert_close(joined(call, "products"), expected)
    torch.testing.assert_close(joined(call, "scores"), 0.5 * torch.tanh(expected / 0.5) if way is capped else expected)
    assert isinstance(call, FusedCall if way is fused else WrittenCall)


@pytest.mark.parametrize("queries", [1, 2, 5])
def test_blocks_cover_all_queries(queries, monkeypatch):
    """Blocks of any size join to the same masked scores."""
    query, key = torch.randn(2, 2, 5, 4), torch.randn(2, 1, 6, 4)
    mask = torch.rand(2, 1, 5, 6) < 0.7
    call = FusedCall(query=query, key=key, scale=0.3, mask=mask, causal=True, window=3)
    places, keys = torch.arange(5)[:, None], torch.arange(6)
    visible = mask & (keys <= places) & (keys > places - 3)
    expected = (0.3 * query @ key.mT).masked_fill(~visible, -torch.inf)
    monkeypatch.setattr("loopscope.hooks.attention_calls.BLOCK_ELEMENTS", {"cpu": 12 * queries})
    seen = torch.full_like(expected, torch.nan)
    starts = dict.fromkeys(range(2), 0)
    for block in call.blocks():
        for place, sample in enumerate(range(*block.samples.indices(2))):
            start = starts[sample]
            seen[sample, :, start : start + block.scores.shape[2]] = block.scores[place]
            starts[sample] += block.scores.shape[2]
    torch.testing.assert_close(seen, expected)


def test_additive_masks_hide_and_shift():
    """A mask of numbers is added to the scores, and hides keys at −10⁴ and below."""
    mask = torch.tensor([[0.5, -1e4, -torch.inf, 0.0]])
    call = FusedCall(query=torch.ones(1, 1, 1, 2), key=torch.ones(1, 1, 4, 2), scale=1.0, mask=mask)
    (block,) = call.blocks()
    assert block.scores.flatten().tolist() == [2.5, -math.inf, -math.inf, 2.0]
    assert block.products.flatten().tolist() == [2.0, -math.inf, -math.inf, 2.0]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", [plain, fused])
def test_recomputed_attention_is_read_once(way, reentrant):
    inner = Written(way)
    outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
    calls = attach(outer, "1")
    checkpoint(inner, outer[0](tokens()), use_reentrant=reentrant).sum().backward()
    assert len(calls) == 1


def test_innermost_tapped_module_reads_attention():
    """Taps on a layer and on a layer inside of it share no call."""
    model = nn.Sequential(Written(fused), nn.Sequential(Written(plain)))
    calls = attach(model, "", "1", "1.0")
    model(tokens())
    assert [target for target, _ in calls] == ["", "1.0"]


def test_autocast_queries_are_those_multiplied():
    """Under autocasting, the products are those of the cast queries and keys, without another rounding."""
    for way in (plain, fused):
        model = Written(way)
        calls = attach(model, "")
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens())
        ((_, call),) = calls
        assert call.query.dtype is torch.bfloat16
        expected = call.query.float() @ call.key.float().mT / 2
        torch.testing.assert_close(joined(call, "products"), expected, rtol=1e-6, atol=1e-6)


class Reader(TrainingHook):
    """An observer with attention taps."""

    name = "reader"
    hook_points = frozenset({HookPoint.POST_BACKWARD})

    def __init__(self, *taps: AttentionTap) -> None:
        self._taps = taps

    def compute(self, ctx):
        return {}

    def taps(self, model):
        return self._taps


def test_taps_within_attention_run_without_its_reader():
    """The reader, which would be called for every operation of a tap, is active again after each of them."""
    depths = {"linear": [], "attention": []}

    def count(name: str, *_: object) -> None:
        depths[name].append(torch._C._len_torch_function_stack())

    taps = [ForwardTap(f"{LAYER}.qkv", partial(count, "linear")), AttentionTap(LAYER, partial(count, "attention"))]
    train(CASE, [Reader(*taps)])
    assert {*depths["linear"], *depths["attention"]} == {0}
    assert len(depths["linear"]) == len(depths["attention"]) > 0


@pytest.mark.longer
@pytest.mark.guarantee("observers-change-nothing")
def test_reading_and_drawing_taps_change_nothing():
    """Two taps draw random numbers; the run equals the bare run at every step, and no module hook remains."""
    seen = []

    def read(call: AttentionCall) -> None:
        seen.extend(block.scores.softmax(-1) for block in call.blocks())
        torch.rand(3)
        random.random()

    run = train(CASE, [Reader(AttentionTap(LAYER, read), AttentionTap(LAYER, read))], audit=True)
    digests, final = bare_run(CASE)
    for expected, digest in zip(digests, run.digests, strict=True):
        assert not differences(expected, digest)
    assert not differences(final, run.final)
    assert len(seen) == 6
    modules = list(run.task.model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    assert torch._C._len_torch_function_stack() == 0


def test_interrupted_pass_leaves_no_mode():
    """An exception in the attention, which is no ``Exception``, leaves no function mode behind."""

    def interrupt(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = Written(interrupt)
    owner = TapOwner("reader", lambda: True, lambda target, function: function(), False)
    taps = TapSet(model)
    taps.attach(owner, [AttentionTap("", print)])
    with pytest.raises(KeyboardInterrupt):
        model(tokens())
    taps.remove()
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.longer
@pytest.mark.guarantee("commits-are-declared")
@pytest.mark.parametrize("audit", [False, True])
def test_changed_queries_are_caught(audit):
    """A tap only reads, and its hook is named; writes through ``.data`` are caught under audit."""

    def write(call: AttentionCall) -> None:
        (call.query.data if audit else call.query).zero_()

    run = train(CASE, [Reader(AttentionTap(LAYER, write))], audit=audit, raises=StateMutationError)
    assert f"The tap of hook 'reader' on '{LAYER}' changed a tensor of an attention call" in str(run.error)


def test_unknown_module_is_refused():
    with pytest.raises(UsageError, match=r"Unknown module 'nine'"):
        attach(Written(plain), "nine")
