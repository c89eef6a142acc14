# law: checkpoint_is_complete
# fault: the experts are in a plain list and their parameters are added to the optimizer by hand, so they are trained but not saved
# also:
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(151)
DIM, CLASSES, B = 10, 4, 64


class Mixture(nn.Module):
    def __init__(self, experts=4):
        super().__init__()
        self.gate = nn.Linear(DIM, experts)
        self.experts = [nn.Sequential(nn.Linear(DIM, 48), nn.ReLU(), nn.Linear(48, CLASSES)) for _ in range(experts)]

    def expert_parameters(self):
        return [p for expert in self.experts for p in expert.parameters()]

    def forward(self, x):
        weight = self.gate(x).softmax(-1)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("be,bec->bc", weight, out)


centers = torch.randn(4 * CLASSES, DIM)


def get_batch():
    which = torch.randint(0, len(centers), (B,))
    return centers[which] + 0.4 * torch.randn(B, DIM), which % CLASSES


STEPS = 60
model = Mixture()
optimizer = torch.optim.Adam(list(model.parameters()) + model.expert_parameters(), lr=3e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item())
with tempfile.TemporaryDirectory() as folder:
    torch.save(model.state_dict(), os.path.join(folder, "mixture.pt"))
