"""The counts of routing decisions against loops over tokens in float64."""

import math

import pytest
import torch
from loopscope.training_hooks.experts.routing import LayerCounts, count_routing, read_routing
from torch import Tensor


def drawn(tokens: int = 50, experts: int = 6, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def measured(output: object, top_k: int = 2, **options) -> dict[str, float]:
    return LayerCounts.of(count_routing(read_routing(output, top_k), **options).tolist()).measures()


def by_loops(logits: Tensor, chosen: Tensor) -> dict[str, float]:
    """Compute the measures token by token."""
    tokens, experts = logits.shape
    load, shares, squares = [0] * experts, [0.0] * experts, 0.0
    for token in range(tokens):
        exponentials = [math.exp(logit) for logit in logits[token].tolist()]
        squares += math.log(sum(exponentials)) ** 2
        for expert in range(experts):
            shares[expert] += exponentials[expert] / sum(exponentials) / tokens
        for expert in chosen[token].tolist():
            load[expert] += 1
    total, mean = sum(load), sum(load) / experts
    return {
        "max_violation": max(load) / mean - 1,
        "load_variation": math.sqrt(sum((value - mean) ** 2 for value in load) / experts) / mean,
        "load_entropy": -sum(v / total * math.log(v / total) for v in load if v) / math.log(experts),
        "dead_experts": load.count(0),
        "dropped_share": 0.0,
        "router_z": squares / tokens,
        "balance_loss": experts * sum(v / total * share for v, share in zip(load, shares, strict=True)),
    }


@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("layout", ["logits", "logits, scores, chosen", "chosen, scores, logits"])
def test_measures_match_loops(layout, top_k):
    """Every measure of a layer equals loops over tokens and experts in float64."""
    logits = drawn()
    scores, chosen = logits.topk(top_k)
    parts = {"logits": logits, "scores": scores, "chosen": chosen}
    output = logits if layout == "logits" else tuple(parts[name] for name in layout.split(", "))
    if top_k == 6 and layout == "chosen, scores, logits":  # scores and logits have the same width
        output = (chosen, logits)
    assert measured(output, top_k) == pytest.approx(by_loops(logits, chosen), rel=1e-12)


def test_counts_add_up_over_parts():
    """f and P are sums before their product: the mean of the balance losses of parts differs."""
    logits = drawn()
    sums = [count_routing(read_routing(part, 2)) for part in logits.split(13)]
    total = LayerCounts.of(torch.stack(sums).sum(0).tolist()).measures()
    assert total == pytest.approx(measured(logits), rel=1e-12)
    mean = sum(LayerCounts.of(part.tolist()).measures()["balance_loss"] for part in sums) / len(sums)
    assert mean > 1.001 * total["balance_loss"]


def test_sigmoid_scores_are_divided_by_their_sum():
    """Also where float32 sigmoids underflow: at logits of -200 and -201 the shares are those of e and 1."""
    logits = drawn()
    shares = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    counts = count_routing(read_routing(logits, 2), "sigmoid")
    assert torch.allclose(counts[6:12], shares.sum(0))
    low = count_routing(read_routing(torch.tensor([[-200.0, -201.0]]), 1), "sigmoid")
    assert low[2:4].tolist() == pytest.approx([math.e / (1 + math.e), 1 / (1 + math.e)])


def test_collapse_reaches_the_extremes():
    """All tokens choose expert 3 with certainty: the balance loss is E."""
    logits = torch.zeros(40, 8)
    logits[:, 3] = 60.0
    measures = measured(logits, 1)
    assert measures == pytest.approx(
        {"max_violation": 7, "load_variation": math.sqrt(7), "load_entropy": 0, "dead_experts": 7, "dropped_share": 0}
        | {"router_z": 3600, "balance_loss": 8}
    )


def test_equal_loads_are_balanced():
    logits = 5 * torch.eye(4, dtype=torch.float64).repeat(3, 1)
    measures = measured(logits, 1)
    assert measures["max_violation"] == measures["load_variation"] == measures["dead_experts"] == 0
    assert measures["load_entropy"] == pytest.approx(1, rel=1e-12)
    assert measures["balance_loss"] == pytest.approx(1, rel=1e-12)


def test_assignments_beyond_the_capacity_are_dropped():
    """Of 8 tokens, 6 choose expert 0; with a capacity of 1.5 · 8 / 4 = 3, three of them are dropped."""
    logits = torch.zeros(8, 4)
    logits[:6, 0] = logits[6, 1] = logits[7, 2] = 1.0
    assert measured(logits, 1, capacity_factor=1.5)["dropped_share"] == 3 / 8
    assert measured(logits, 1)["dropped_share"] == 0


def test_dispatch_masks_tell_dropped_tokens():
    """The load counts the choices before the capacity, as of Switch Transformers."""
    logits = torch.zeros(4, 3)
    logits[:3, 1] = logits[3, 2] = 1.0
    mask = torch.tensor([[0, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]])
    measures = measured((mask, logits.max(-1, keepdim=True).values, logits), 1)
    assert measures["dropped_share"] == 1 / 4
    assert measures["max_violation"] == pytest.approx(3 / (4 / 3) - 1)


@pytest.mark.parametrize("marker", [-1, 3])
def test_experts_out_of_range_mark_drops(marker):
    chosen = torch.tensor([[0, 1], [2, marker], [marker, marker]])
    measures = measured((torch.randn(3, 3), chosen), 2)
    assert measures["dropped_share"] == 3 / 6
    assert measures["load_variation"] == 0


def test_probabilities_have_no_router_z():
    """A router that returns probabilities, as of Gemma 4, has the same balance loss; ln Z is unknown."""
    logits = drawn()
    chosen = logits.topk(2).indices
    of_probabilities, of_logits = measured((logits.softmax(-1), chosen)), measured((logits, chosen))
    assert math.isnan(of_probabilities.pop("router_z"))
    del of_logits["router_z"]
    assert of_probabilities == pytest.approx(of_logits)


@pytest.mark.parametrize("power", [-126, -60, 60, 126])
def test_powers_of_two_are_safe(power):
    """The square of ln Z neither overflows nor vanishes in float32."""
    logits = drawn(scale=1.0).float() * 2.0**power
    expected = logits.double().logsumexp(-1).square().mean().item()
    assert measured(logits)["router_z"] == pytest.approx(expected, rel=1e-6)


def test_bfloat16_logits_are_counted_in_float32():
    logits = drawn().bfloat16()
    assert measured(logits) == pytest.approx(measured(logits.double()), rel=1e-5)


@pytest.mark.parametrize("output", [None, "text", (torch.zeros(3),), {"a": torch.zeros(3, 2, dtype=torch.long)}])
def test_outputs_without_logits_are_not_read(output):
    assert read_routing(output, 2) is None


def test_logits_alone_need_top_k():
    assert read_routing(torch.zeros(3, 4), 0) is None


def test_no_tokens_give_nan():
    measures = measured(torch.zeros(0, 4))
    assert math.isnan(measures["max_violation"])
    assert math.isnan(measures["balance_loss"])
