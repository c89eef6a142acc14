"""A loop in the style of nanoGPT that learns sums such as 12+7=19, with hooks of loopscope attached.

Lines with the comment `# added` are those of loopscope; `# in place of` names the original code of a changed line.
"""

import math
import random

import loopscope  # added
import torch
from torch import nn
from torch.nn import functional

STEPS, WARM_UP, LEARNING_RATE, ACCUMULATION, BATCH, BLOCK, WIDTH = 80, 10, 3e-3, 2, 8, 24, 32
sums = [f"{a}+{b}={a + b};" for a in range(60) for b in range(60)]
text = "".join(random.Random(0).sample(sums, len(sums)))
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
parts = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}
training, evaluation = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)


def get_batch(part, generator):
    starts = torch.randint(len(parts[part]) - BLOCK, (BATCH,), generator=generator)
    rows = torch.stack([parts[part][start : start + BLOCK + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(letters), WIDTH), nn.Embedding(BLOCK, WIDTH)
        options = {"dim_feedforward": 4 * WIDTH, "dropout": 0.1, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **options) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(letters))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK))

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = {part: sum(loss_of(model, get_batch(part, evaluation)).item() for _ in range(5)) / 5 for part in parts}
    model.train()
    return {"train_loss": losses["train"], "val_loss": losses["val"]}


def learning_rate(step):
    if step < WARM_UP:
        return LEARNING_RATE * (step + 1) / WARM_UP
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
options = {"weight_updates": {"interval": 20}}  # added
steps = {"loop": "step", "length": STEPS, "accumulate": ACCUMULATION, "out": "runs/nanogpt"}  # added
hooks = ["weight_updates", "gradient_flow"]  # added
scope = loopscope.attach(model, optimizer, hooks=hooks, hook_options=options, **steps)  # added
batches = scope.batches(iter(lambda: get_batch("train", training), None))  # added
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    if step % 40 == 0:
        print(step, scope.evaluate(estimate_loss))  # in place of: print(step, estimate_loss())
    for _ in range(ACCUMULATION):
        batch = next(batches)  # in place of: batch = get_batch("train", training)
        loss = loss_of(model, batch) / ACCUMULATION
        scope.backward(loss)  # in place of: loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(STEPS, scope.evaluate(estimate_loss))  # in place of: print(STEPS, estimate_loss())
scope.close()  # added
print("median of |update| / |weight|:", scope.last_metrics()["weight_updates/update_ratio_median"])  # added
