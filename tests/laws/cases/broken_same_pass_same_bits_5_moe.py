# law: same_pass_same_bits
# fault: the temperature of the router is annealed by counting the calls of forward, so accumulation, evaluation and recomputation all move it
# also: checkpoint_is_complete
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(4)


class Router(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        temperature = max(0.5, 4.0 * 0.97**self.calls)
        return F.softmax(self.gate(x) / temperature, dim=-1)


class SoftMixture(nn.Module):
    def __init__(self, dim=16, hidden=32, classes=5, experts=4):
        super().__init__()
        self.router = Router(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, classes)) for _ in range(experts)
        )

    def forward(self, x):
        weight = self.router(x)
        out = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (weight.unsqueeze(-1) * out).sum(1)


centers = torch.randn(5, 16) * 2


def get_batch(n=64):
    y = torch.randint(0, 5, (n,))
    return centers[y] + torch.randn(n, 16), y


STEPS = 60
model = SoftMixture()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(STEPS):
    x, y = get_batch()
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item(), (logits.argmax(1) == y).float().mean().item())
