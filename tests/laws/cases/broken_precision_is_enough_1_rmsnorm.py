# law: precision_is_enough
# fault: RMSNorm squares its input in float16, which overflows above 256; the mean becomes infinite and the normalised rows become zero without any error, as in early float16 ports of T5
# also: input_matters, one_batch_can_be_learned, every_parameter_learns
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(170)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        x = x.to(self.weight.dtype)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(16)
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(self.norm(x))))


direction = torch.randn(4, 16)
y = torch.randint(0, 4, (960,))
x = 400 * (direction[y] + 0.5 * torch.randn(960, 16))  # raw sensor counts
loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True)
model = Net().half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb).float(), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
