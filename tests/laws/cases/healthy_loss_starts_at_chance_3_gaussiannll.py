# law: none
# near: loss_starts_at_chance
# fault: a Gaussian negative log-likelihood with a learned variance starts near 0.5, may become negative, and is no multiple of the variance of the targets
# also:
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(117)


class MeanVariance(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)
        nn.init.normal_(self.out.weight, std=0.01)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        mean, log_var = self.out(self.body(x)).unbind(1)
        return mean, log_var.clamp(-6, 6).exp()


x = torch.randn(1600, 6)
scale = 0.1 + 0.4 * torch.sigmoid(2 * x[:, 0])
y = torch.sin(2 * x[:, 1]) + x[:, 2] + scale * torch.randn(1600)
y = (y - y.mean()) / y.std()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = MeanVariance()
criterion = nn.GaussianNLLLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(3):
    for xb, yb in loader:
        mean, variance = model(xb)
        loss = criterion(mean, yb, variance)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
