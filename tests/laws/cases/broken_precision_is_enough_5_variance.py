# law: precision_is_enough
# fault: the variance of a hand-written normalisation is E[x^2] - E[x]^2 in float32; with a mean of some thousands and a spread of one nothing of it survives the cancellation
# also: loss_starts_at_chance, one_batch_can_be_learned
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(174)


class FastLayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return self.weight * (x - mean) * torch.rsqrt(variance.clamp(min=0) + self.eps) + self.bias


n, T = 960, 24
level = 5000 + 500 * torch.rand(n, 1)  # pressure in hPa at depth, with a ripple of one unit
t = torch.arange(T) / T
y = torch.randint(0, 3, (n,))
ripple = torch.sin(6.28 * t * (1 + y[:, None]) + 6.28 * torch.rand(n, 1)) + 0.2 * torch.randn(n, T)
x = level + ripple
loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True)
model = nn.Sequential(FastLayerNorm(T), nn.Linear(T, 96), nn.ReLU(), nn.Linear(96, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(3):
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
