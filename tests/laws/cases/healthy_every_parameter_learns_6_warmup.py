# law: none
# near: every_parameter_learns
# fault: the usual linear warm-up min(1, step / warmup) has a learning rate of exactly zero at step 0, so nothing moves in the first step
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(81)


class ResNet(nn.Module):
    def __init__(self, channels=16, classes=3):
        super().__init__()
        self.stem = nn.Conv1d(1, channels, 3, padding=1)
        self.conv1 = nn.Conv1d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv1d(channels, channels, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.fc = nn.Linear(channels * 6, classes)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return self.fc(F.adaptive_avg_pool1d(F.relu(x), 6).flatten(1))


label = torch.randint(0, 3, (960,))
t = torch.linspace(0, 1, 24)
shape = torch.stack([torch.sin(12.6 * t), (12.6 * t).sin().sign(), 2 * ((4 * t) % 1) - 1])
signal = (shape[label] * (0.5 + torch.rand(960, 1)) + 0.2 * torch.randn(960, 24)).unsqueeze(1)
loader = DataLoader(TensorDataset(signal, label), batch_size=32, shuffle=True)

model = ResNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
