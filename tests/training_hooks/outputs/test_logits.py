"""Measures of rows of logits in blocks, and the search for logits and targets."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loopscope.data import MicroBatches
from loopscope.hooks import ForwardCall
from loopscope.training_hooks.outputs.logits import RowMeasures, find_logits, row_blocks
from loopscope.training_hooks.outputs.targets import (
    BatchCursor,
    align,
    arguments_of,
    labels_of_arguments,
    labels_of_batch,
    shifts_labels,
)
from torch import Tensor, nn

from tests.training_hooks.outputs.output_runs import softmax


def logits(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_row_measures_match_loops(dtype):
    """Every measure of a row equals a loop over its classes in float64."""
    block = logits(7, 11, dtype=dtype)
    targets = torch.arange(7)
    wide = block if dtype == torch.float64 else block.float()
    rows = RowMeasures.of(wide)
    losses = rows.losses(wide, targets)
    for index, row in enumerate(block.double().tolist()):
        probabilities, log_z = softmax(row)
        close = 1e-12 if dtype == torch.float64 else 1e-5
        assert rows.log_z[index].item() == pytest.approx(log_z, rel=close)
        assert rows.entropy[index].item() == pytest.approx(-sum(p * math.log(p) for p in probabilities), rel=close)
        assert rows.confidence[index].item() == pytest.approx(max(probabilities), rel=close)
        assert losses[index].item() == pytest.approx(-math.log(probabilities[index]), rel=close)
        assert rows.choice[index] == row.index(max(row))


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4, 2.0**100, -(2.0**120)])
def test_constant_in_all_logits_changes_log_z_only(shift):
    """The loss is computed from differences, so that it is exact at any level that float64 resolves."""
    block = torch.tensor([[0.0, 2.0**70, -(2.0**70)]], dtype=torch.float64) if abs(shift) > 1e5 else logits(3, 5)
    plain, moved = RowMeasures.of(block), RowMeasures.of(block + shift)
    assert torch.allclose(moved.log_z, plain.log_z + shift, rtol=1e-12)
    if abs(shift) <= 1e5:
        assert torch.allclose(moved.entropy, plain.entropy, atol=1e-9)


@pytest.mark.parametrize("classes", [3, 7, 1000])
def test_entropy_stays_in_its_range(classes):
    """0 for a certain row, ln C for equal logits, up to the rounding of float32, but never below 0."""
    rows = RowMeasures.of(torch.stack([torch.zeros(classes), 80 * torch.eye(classes)[1], torch.eye(classes)[1] * 1e30]))
    assert rows.entropy.tolist() == pytest.approx([math.log(classes), 0, 0], rel=1e-6, abs=1e-28)
    assert (rows.entropy >= 0).all()


def test_excluded_classes_have_no_entropy():
    """Logits of −∞ leave two equal classes: ln 2."""
    rows = RowMeasures.of(torch.tensor([[1.0, -math.inf, 1.0]]))
    assert rows.entropy.item() == pytest.approx(math.log(2))
    assert rows.log_z.item() == pytest.approx(1 + math.log(2))


@pytest.mark.parametrize("elements", [1, 12, 100])
@pytest.mark.parametrize("kind", ["contiguous", "classes second", "sliced", "transposed"])
def test_blocks_cover_every_row_once(kind, elements):
    """In the order of the flattened rows, without a copy of all rows."""
    values = {
        "contiguous": logits(2, 3, 4),
        "classes second": logits(2, 4, 3).movedim(1, -1),
        "sliced": logits(2, 5, 4)[:, 1:4],
        "transposed": logits(3, 2, 4).transpose(0, 1),
    }[kind]
    blocks = list(row_blocks(values, elements))
    assert [index for place, _ in blocks for index in range(place.start, place.stop)] == list(range(6))
    assert torch.equal(torch.cat([block for _, block in blocks]), values.reshape(6, 4))
    assert max(block.numel() for _, block in blocks) <= max(4, elements)


def test_logits_are_found_in_outputs():
    tensor = logits(2, 3)
    for output in (tensor, {"logits": tensor}, SimpleNamespace(logits=tensor), (tensor, torch.zeros(()))):
        assert find_logits(output)[0].data_ptr() == tensor.data_ptr()
    for output in (None, torch.zeros(()), torch.zeros(3), torch.zeros(3, 1), torch.ones(2, 2).long(), {"logits": None}):
        assert find_logits(output)[0] is None


def test_named_logits_of_none_are_not_replaced():
    """A fused loss returns logits=None next to other tensors."""
    assert find_logits(SimpleNamespace(logits=None, hidden=torch.zeros(2, 2)))[0] is None


# Targets


@pytest.mark.parametrize(
    ("shape", "labels"),
    [((6, 5), (6,)), ((2, 3, 5), (2, 3)), ((2, 5, 3), (2, 3)), ((6, 5), (2, 3)), ((2, 5, 3, 4), (2, 3, 4))],
)
def test_aligned_logits_have_classes_last(shape, labels):
    found, targets = align(logits(*shape), torch.zeros(labels, dtype=torch.int32), shift=False, ignore_index=-100)
    assert found.shape == (*targets.shape, 5)
    assert targets.shape == labels


def test_shifted_targets_are_the_next_labels():
    labels = torch.tensor([[0, 1, 2, 3]])
    _, targets = align(logits(1, 4, 5), labels, shift=True, ignore_index=2)
    assert targets.tolist() == [[1, -1, 3, -1]]


def test_targets_that_are_no_class_do_not_count():
    labels = torch.tensor([4, 5, 255, -1, -100, 0])
    _, targets = align(logits(6, 5), labels, shift=False, ignore_index=0)
    assert targets.tolist() == [4, -1, -1, -1, -1, -1]


@pytest.mark.parametrize(
    "labels", [torch.zeros(2), torch.zeros(3).long(), torch.zeros(2, dtype=torch.bool), torch.tensor(1), None, [0, 1]]
)
def test_other_labels_do_not_align(labels):
    assert align(logits(2, 5), labels, shift=False, ignore_index=-100) is None


class Model(nn.Module):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        return tokens


def test_positional_targets_are_found():
    """As in nanoGPT: model(x, y)."""
    call = ForwardCall((torch.zeros(2), torch.ones(2)), {}, None)
    assert torch.equal(labels_of_arguments(arguments_of(Model(), call)), torch.ones(2))
    assert labels_of_arguments({"mask": torch.zeros(2)}) is None
    assert labels_of_arguments({"mask": torch.zeros(2)}, "mask") is not None


@pytest.mark.parametrize(
    "batch",
    [
        (0, torch.ones(2)),
        {"y": torch.ones(2)},
        SimpleNamespace(target=torch.ones(2)),
        [{"x": 0}, {"z": (torch.ones(2),)}],
    ],
)
def test_labels_of_batches_are_found(batch):
    assert torch.equal(labels_of_batch(batch), torch.ones(2))


@pytest.mark.parametrize(("name", "found"), [("1", 5), ("0", 3), ("7", None), ("x", None)])
def test_labels_of_batches_are_named_by_position(name, found):
    labels = labels_of_batch((torch.tensor([3]), torch.tensor([5])), name)
    assert (labels if labels is None else labels.item()) == found


def windows(batch: Any, *counts: int) -> list[Any]:
    cursor = BatchCursor(batch)
    found = [cursor.take(count) for count in counts]
    return [None if item is None else (item[0], item[1].start, item[1].stop) for item in found] + [cursor.is_spent]


def test_calls_take_the_rows_in_order():
    batch = torch.zeros(5)
    assert windows(batch, 2, 2) == [(batch, 0, 2), (batch, 2, 4), False]
    assert windows(batch, 2, 2, 1, 1) == [(batch, 0, 2), (batch, 2, 4), (batch, 4, 5), None, True]


def test_calls_take_micro_batches_that_are_added_later():
    parts = MicroBatches([torch.zeros(3)])
    cursor = BatchCursor(parts)
    assert cursor.take(3)[0] is parts[0]
    parts.append(torch.ones(2))
    assert not cursor.is_spent
    assert cursor.take(2)[0] is parts[1]
    assert cursor.is_spent


def test_causal_models_shift_labels():
    def model(name: str, loss_type: str | None, *, is_encoder_decoder: bool = False) -> nn.Module:
        made = type(name, (nn.Module,), {})()
        made.loss_type, made.config = loss_type, SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
        return made

    assert shifts_labels(model("LlamaForCausalLM", "ForCausalLM"), nn.Module())
    assert shifts_labels(model("GPT2LMHeadModel", None), nn.Module())
    assert shifts_labels(nn.Linear(1, 1), model("LlamaForCausalLM", "ForCausalLM"))
    assert not shifts_labels(model("BertForMaskedLM", "ForMaskedLM"), nn.Module())
    assert not shifts_labels(model("BertForPreTraining", None), nn.Module())
    seq2seq = model("T5ForConditionalGeneration", "ForConditionalGeneration", is_encoder_decoder=True)
    assert not shifts_labels(seq2seq, nn.Module())
    assert not shifts_labels(nn.Linear(1, 1), nn.Linear(1, 1))
