# law: none
# near: every_parameter_learns
# fault: adapters start with B = 0, so A has a gradient of exactly zero at the first step and moves from the second on; the base is frozen by requires_grad
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(76)
DIM, CLASSES, B = 16, 5, 48


class LoRALinear(nn.Module):
    def __init__(self, base, rank=8, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T @ self.b.T)


def get_batch():
    x = torch.randn(B, DIM)
    return x, (x @ task).argmax(1)


model = nn.Sequential(nn.Linear(DIM, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, CLASSES))
nn.init.normal_(model[4].weight, std=0.02)
nn.init.zeros_(model[4].bias)
for i in (0, 2, 4):
    model[i] = LoRALinear(model[i])
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)

task = torch.randn(DIM, CLASSES)
STEPS = 60
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f}")
