# law: none
# near: every_parameter_learns
# fault: top-1 routing sends no token of a small batch to some of the 12 experts, which get no gradient in that step; they learn from other batches
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(78)
DIM, CLASSES, E, B = 12, 6, 12, 24


class SwitchLayer(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.gate = nn.Linear(DIM, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, width), nn.GELU(), nn.Linear(width, DIM)) for _ in range(E)
        )

    def forward(self, x):
        probability = self.gate(x).softmax(-1)
        weight, choice = probability.max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (choice == e).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return x + out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = SwitchLayer()
        self.head = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, x):
        return self.head(self.moe(x))


centers = 2 * torch.randn(CLASSES * 3, DIM)


def get_batch():
    which = torch.randint(0, len(centers), (B,))
    return centers[which] + 0.5 * torch.randn(B, DIM), which % CLASSES


STEPS = 80
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
