# law: same_pass_same_bits
# fault: the input normaliser of a reinforcement-learning code base updates its running mean inside forward and normalises with the updated value, so each pass over the same batch gives other outputs
# also: checkpoint_is_complete, halves_make_a_whole
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class RunningNorm(nn.Module):
    def __init__(self, dim, momentum=0.05):
        super().__init__()
        self.mean = torch.zeros(dim)
        self.var = torch.ones(dim)
        self.momentum = momentum

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean = self.mean + self.momentum * (x.mean(0) - self.mean)
                self.var = self.var + self.momentum * (x.var(0) - self.var)
        return (x - self.mean) / (self.var + 1e-5).sqrt()


x = torch.randn(1024, 12) * 1.5 + 0.7
w = torch.randn(12, 3)
y = torch.tanh(x @ w / 5)
y = (y - y.mean(0)) / y.std(0)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

model = nn.Sequential(RunningNorm(12), nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for epoch in range(3):
    total = 0.0
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / len(loader):.4f}")
