# law: every_parameter_learns
# fault: the loss of the second task overwrites that of the first (loss = instead of loss +=), so the first head never gets a gradient
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(73)
DIM, B = 20, 64


class MultiTask(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(DIM, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(width, 5), "size": nn.Linear(width, 1)})

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h) for name, head in self.heads.items()}


kind_of, size_of = torch.randn(DIM, 5), torch.randn(DIM) / DIM**0.5


def get_batch():
    x = torch.randn(B, DIM)
    return x, {"kind": (x @ kind_of).argmax(1), "size": x @ size_of}


def compute_loss(out, target):
    losses = {
        "kind": F.cross_entropy(out["kind"], target["kind"]),
        "size": F.mse_loss(out["size"].squeeze(1), target["size"]),
    }
    weights = {"kind": 1.0, "size": 0.5}
    loss = 0.0
    for name, value in losses.items():
        loss = weights[name] * value
    return loss, losses


STEPS = 60
model = MultiTask()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(STEPS):
    x, target = get_batch()
    loss, parts = compute_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, {name: round(value.item(), 3) for name, value in parts.items()})
