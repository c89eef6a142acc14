"""Training of a small GPT on the text of these pages, for pictures."""

from collections.abc import Callable, Iterable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import loopscope
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from docs.hook_pictures import DOCS

BATCH, LENGTH, WIDTH, LAYERS, WARM_UP = 8, 64, 64, 3, 20


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95))


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        options: dict[str, Any] = {
            "dim_feedforward": 4 * WIDTH,
            "dropout": 0.0,
            "batch_first": True,
            "norm_first": True,
        }
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **options) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Draw batches of inputs and next bytes from the text of docs/."""
    text = b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))
    data, generator = torch.tensor(list(text)), torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - LENGTH, (steps, BATCH), generator=generator)
    rows = torch.stack([torch.stack([data[start : start + LENGTH + 1] for start in row]) for row in starts.tolist()])
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def spoil(step: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Replace batch 75 by random bytes."""
    if step != 75:
        return batch
    drawn = torch.randint(256, (2, *batch[0].shape), generator=torch.Generator().manual_seed(1))
    return drawn[0], drawn[1]


def train(
    hook: str,
    options: Mapping[str, Any],
    *,
    steps: int,
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = lambda model: [adamw(model.parameters())],
    change: Callable[[int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]] = lambda step, batch: batch,
    max_norm: float = 1.0,
) -> pd.DataFrame:
    """Train with a hook, a warm-up and linear decay of the learning rate; return the hook's metrics by step.

    Args:
        hook: name of the hook.
        options: options of the hook.
        steps: number of steps.
        optimizers: makes the optimizers; by default AdamW.
        change: replaces the batch of a step, which is counted from 1.
        max_norm: limit of the joint gradient norm.
    """
    torch.manual_seed(0)
    model = GPT()
    chosen = optimizers(model)
    base_rates = [group["lr"] for item in chosen for group in item.param_groups]
    data: Iterable[tuple[Tensor, Tensor]] = [change(step, batch) for step, batch in enumerate(batches(steps), start=1)]
    with TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"hook_options": {hook: dict(options)}, "out": f"{folder}/run", "display": "none"}
        with loopscope.attach(model, chosen, hooks=[hook], **settings) as scope:
            for step, (inputs, targets) in enumerate(scope.batches(data), start=1):
                groups = [group for item in chosen for group in item.param_groups]
                for group, rate in zip(groups, base_rates, strict=True):
                    group["lr"] = rate * min(step / WARM_UP, (steps - step) / (steps - WARM_UP))
                scope.backward(functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                for item in chosen:
                    item.step()
                model.zero_grad()
        frame = loopscope.read_run(f"{folder}/run").frame()
    own = frame[[name for name in frame if name.startswith(f"{hook}/")]]
    return own.rename(columns=lambda name: name.removeprefix(f"{hook}/"))
