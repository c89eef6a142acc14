"""How often laws with an error bar are broken by right trainings: random models, batches and precisions."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from loopscope import testing
from loopscope.testing import check_training
from torch import Tensor, nn
from torch.nn import functional as F

SEEDS = 100
LAWS = (
    "halves_make_a_whole",
    "order_does_not_matter",
    "precision_is_enough",
    "padding_does_not_matter",
    "loss_starts_at_chance",
    "rows_do_not_mix",
)
Batch = dict[str, Tensor]


class Classifier(nn.Module):
    """A network of random width and depth."""

    def __init__(self) -> None:
        super().__init__()
        width, depth = (int(torch.randint(low, high, ())) for low, high in ((8, 100), (0, 4)))
        inner = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
        self.layers = nn.Sequential(nn.Linear(12, width), nn.Tanh(), *inner, nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Masked(nn.Module):
    """A layer of attention that masks padded positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(12, 32), nn.Linear(32, 4)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.layer(self.embed(x), src_key_padding_mask=~mask) * mask[..., None]
        return self.head(hidden.sum(1) / mask.sum(1, keepdim=True))


def _batch() -> Batch:
    rows = 2 * int(torch.randint(4, 30, ()))
    lengths = torch.randint(1, 8, (rows, 1))
    return {
        "x": torch.randn(rows, 12),
        "sequence": torch.randn(rows, 7, 12),
        "mask": torch.arange(7) < lengths,
        "y": torch.randint(0, 4, (rows,)),
        "target": torch.randn(rows, 4),
    }


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def fitted(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["target"])


def masked(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["sequence"], batch["mask"]).float(), batch["y"])


def is_alarm(make: Callable[[], nn.Module], loss: Callable[[nn.Module, Batch], Tensor], dtype: torch.dtype) -> str:
    def computed(model: nn.Module, batch: Batch) -> Tensor:
        with nullcontext() if dtype is torch.float32 else torch.autocast("cpu", dtype):
            return loss(model, batch)

    try:
        check_training(make(), computed, _batch(), laws=LAWS)
    except AssertionError as error:
        return str(error)
    return ""


KINDS = {
    "class": (Classifier, classified, torch.float32),
    "class in bfloat16": (Classifier, classified, torch.bfloat16),
    "fit": (Classifier, fitted, torch.float32),
    "mask": (Masked, masked, torch.float32),
    "mask in bfloat16": (Masked, masked, torch.bfloat16),
}


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("kind", KINDS)
def test_right_trainings_break_no_law(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed has one step: no law of these needs two."""
    monkeypatch.setattr(testing, "STEPS", 1)
    make, loss, dtype = KINDS[kind]
    torch.set_num_threads(1)
    alarms = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        alarms += filter(None, [is_alarm(make, loss, dtype)])
    assert not alarms, f"{len(alarms)} of {SEEDS}: {alarms[0]}"
