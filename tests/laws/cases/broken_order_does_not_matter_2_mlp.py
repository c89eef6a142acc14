# law: order_does_not_matter
# fault: the sample weights are taken by place in the batch (weights[:len(x)]) instead of by index in the data set, so the first rows of a batch get the weight of the first rows of the file
# also: halves_make_a_whole
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(101)

n = 1200
x = torch.randn(n, 8)
noise = 0.1 + 1.5 * (torch.rand(n) < 0.3).float()  # a sensor of poor quality in 30 % of the rows
y = torch.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + noise * torch.randn(n)
y = (y - y.mean()) / y.std()
weights = 1 / noise**2
weights = weights / weights.mean()
loader = DataLoader(TensorDataset(x, y, torch.arange(n)), batch_size=40, shuffle=True)

model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(2):
    for xb, yb, index in loader:
        error = (model(xb).squeeze(1) - yb) ** 2
        loss = (weights[: len(xb)] * error).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} weighted error {loss.item():.4f}")

model.eval()
with torch.no_grad():
    good = weights > weights.mean()
    error = (model(x).squeeze(1) - y)[good].square().mean().item()
print(f"error on the rows of good quality {error:.4f}")
