# law: evaluation_changes_nothing
# fault: the evaluation runs under no_grad but without model.eval(), so the running statistics of BatchNorm are updated from the test data
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(141)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(c, c, 3, padding=1, bias=False), nn.BatchNorm1d(c)
        self.conv2, self.bn2 = nn.Conv1d(c, c, 3, padding=1, bias=False), nn.BatchNorm1d(c)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


model = nn.Sequential(
    nn.Conv1d(1, 16, 5, padding=2), Block(16), Block(16), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, 4)
)
y = torch.randint(0, 4, (760,))
t = torch.linspace(0, 1, 32)
x = torch.sin(6.28 * t * (1 + 2 * y[:, None]) + 6.28 * torch.rand(760, 1)).unsqueeze(1) + 0.3 * torch.randn(760, 1, 32)
train = DataLoader(TensorDataset(x[:640], y[:640]), batch_size=32, shuffle=True)
test_x, test_y = x[640:], y[640:]
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@torch.no_grad()
def evaluate():
    logits = model(test_x)
    return F.cross_entropy(logits, test_y).item()


step = 0
for epoch in range(2):
    for xb, yb in train:
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 8 == 0:
            print(f"step {step} train {loss.item():.3f} test {evaluate():.3f}")
