"""Flash attention of Hugging Face's models, which has no scores to read, simulated by a kernel of one function."""

from functools import cache

import pytest
import torch

from tests.training_hooks.circuits.hf_attention import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    HEADS,
    batch_for,
    made,
    written_rows,
)
from tests.training_hooks.circuits.test_attention_logits import measured
from tests.training_hooks.circuits.test_attention_logits_transformers import assert_layers

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
rows_of = cache(written_rows)


class Kernel(torch.autograd.Function):
    """Attention in NumPy, so that torch sees no product and no softmax."""

    @staticmethod
    def forward(ctx, query, key, value, hidden, scaling, softcap):
        repeats = query.shape[1] // key.shape[1]
        scores = query.numpy() @ key.repeat_interleave(repeats, dim=1).numpy().swapaxes(-1, -2) * scaling
        if softcap is not None:
            scores = softcap * torch.from_numpy(scores / softcap).tanh().numpy()
        scores = torch.from_numpy(scores).masked_fill(hidden, -torch.inf)
        shares = (scores - scores.logsumexp(dim=-1, keepdim=True)).exp().nan_to_num()
        return torch.from_numpy(shares.numpy() @ value.repeat_interleave(repeats, dim=1).numpy())

    @staticmethod
    def backward(ctx, gradient):
        return None, None, None, None, None, None


def fake_flash(
    module, query, key, value, mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None, **options
):
    places = torch.arange(query.shape[2])
    hidden = places > places[:, None]
    if sliding_window is not None:
        hidden = hidden | (places <= places[:, None] - sliding_window)
    if mask is not None:
        hidden = hidden | ~mask.bool()[:, None, None, :] | ~mask.bool()[:, None, :, None]
    mixed = Kernel.apply(query, key, value, hidden, scaling or query.shape[-1] ** -0.5, softcap)
    return mixed.transpose(1, 2).contiguous(), None


@pytest.fixture
def flash():
    """Register the kernel as an implementation."""
    ALL_ATTENTION_FUNCTIONS.register("fake_flash", fake_flash)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fake_flash", ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    interface = type(ALL_ATTENTION_FUNCTIONS)
    before = interface.get_interface
    yield "fake_flash"
    assert interface.get_interface is before


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_flash_attention_matches_written_attention(kind, flash):
    """Shared keys, soft caps and windows; without padding, whose rows flash attention leaves out."""
    batch = {key: value for key, value in batch_for(kind).items() if key != "attention_mask"}
    model = made(kind)
    model.config._attn_implementation = flash
    metrics = measured(model, [batch], top=2 * HEADS)
    if kind == "gemma2":
        assert_layers(metrics, rows_of(kind))
    else:
        assert metrics == pytest.approx(measured(made(kind, "sdpa"), [batch], top=2 * HEADS), rel=1e-5)


def test_rows_of_padding_are_left_out(flash):
    """Entropies are means over the rows that the kernel computes."""
    model, batch = made("llama"), batch_for("llama")
    model.config._attn_implementation = flash
    padded = measured(model, [batch], top=2 * HEADS)
    rows = enumerate(batch["attention_mask"].sum(dim=1).tolist())
    single = [{key: value[row : row + 1, :length] for key, value in batch.items()} for row, length in rows]
    alone = measured(made("llama", "sdpa"), single, top=2 * HEADS)
    assert padded == pytest.approx(alone, rel=1e-5)


def test_packed_sequences_see_only_themselves(flash):
    """A batch of one row with positions that restart has the numbers of separate sequences."""
    ids = batch_for("llama")["input_ids"][:1]
    parts = [{"input_ids": ids[:, part], "labels": ids[:, part]} for part in (slice(0, 3), slice(3, 7))]
    model = made("llama")
    model.config._attn_implementation = flash
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = measured(model, [{"input_ids": ids, "labels": ids, "position_ids": positions}], top=2 * HEADS)
    alone = measured(made("llama", "sdpa"), parts, top=2 * HEADS)
    first = [name for name in alone if "layers.0" in name]  # the kernel itself does not separate the sequences
    assert {name: packed[name] for name in first} == pytest.approx({name: alone[name] for name in first}, rel=1e-5)
