# law: evaluation_changes_nothing
# fault: for the evaluation the averaged weights are copied into the model and never copied back, so the training continues from the average
# also:
import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(144)
DIM, B = 10, 64


class EMA:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = copy.deepcopy(model.state_dict())

    def update(self, model):
        for name, value in model.state_dict().items():
            self.shadow[name].lerp_(value, 1 - self.decay)

    def apply_to(self, model):
        model.load_state_dict(self.shadow)


def get_batch():
    x = torch.randn(B, DIM)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]
    return x, y.unsqueeze(1) / 1.25


model = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
ema = EMA(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
valid = get_batch()


def evaluate():
    ema.apply_to(model)
    model.eval()
    with torch.no_grad():
        value = F.mse_loss(model(valid[0]), valid[1]).item()
    model.train()
    return value


STEPS = 60
for step in range(STEPS):
    x, y = get_batch()
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model)
    if (step + 1) % 10 == 0:
        print(step, round(loss.item(), 4), round(evaluate(), 4))
