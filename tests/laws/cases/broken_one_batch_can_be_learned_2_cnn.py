# law: one_batch_can_be_learned
# fault: a ReLU sits after the last layer of a regression whose targets are half negative, so half of the rows can only be answered with zero
# also: every_parameter_learns
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(121)


class KeypointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(24 * 9, 64), nn.Linear(64, 2)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.relu(self.fc2(x))


n = 640
place = torch.rand(n, 2) * 2 - 1
grid = torch.linspace(-1.2, 1.2, 12)
dy = (grid[None, :, None] - place[:, 0, None, None]) ** 2
dx = (grid[None, None, :] - place[:, 1, None, None]) ** 2
image = torch.exp(-(dx + dy) / 0.1).unsqueeze(1) + 0.05 * torch.randn(n, 1, 12, 12)
target = place / place.std(0)
loader = DataLoader(TensorDataset(image, target), batch_size=32, shuffle=True)
model = KeypointNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(2):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
