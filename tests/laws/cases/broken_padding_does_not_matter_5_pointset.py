# law: padding_does_not_matter
# fault: sets of points are padded to the largest set and the mean over points divides by the padded size, while the encoder gives padded points a value through its biases
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(54)
MAX, DIM, B = 12, 3, 32


class DeepSet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(DIM, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.rho = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, points, mask):
        h = self.phi(points)
        return self.rho(h.mean(dim=1)).squeeze(-1)


def get_batch():
    count = torch.randint(3, MAX + 1, (B, 1))
    mask = torch.arange(MAX) < count
    points = torch.randn(B, MAX, DIM) * (0.5 + torch.rand(B, 1, 1))
    points = points * mask.unsqueeze(-1)
    radius = points.norm(dim=-1).sum(1) / count.squeeze(1)
    return points, mask, (radius - 1.6) / 0.55


STEPS = 80
model = DeepSet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(STEPS):
    points, mask, y = get_batch()
    loss = F.mse_loss(model(points, mask), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
