# law: none
# near: evaluation_changes_nothing
# fault: averaged weights are swapped in for the evaluation and the training weights are restored afterwards; the state is the same before and after
# also:
import contextlib

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(146)
DIM, B = 10, 64


class EMA:
    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p, 1 - self.decay)

    @contextlib.contextmanager
    def averaged(self):
        backup = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        try:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(self.shadow[name])
            yield self.model
        finally:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(backup[name])


def get_batch():
    x = torch.randn(B, DIM)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]
    return x, y.unsqueeze(1) / 1.2


model = nn.Sequential(nn.Linear(DIM, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 1))
ema = EMA(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
valid = get_batch()
STEPS = 60
for step in range(STEPS):
    x, y = get_batch()
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update()
    if (step + 1) % 10 == 0:
        with ema.averaged() as averaged, torch.no_grad():
            averaged.eval()
            value = F.mse_loss(averaged(valid[0]), valid[1]).item()
            averaged.train()
        print(step, round(loss.item(), 4), round(value, 4))
