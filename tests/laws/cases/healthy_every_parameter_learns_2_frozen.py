# law: none
# near: every_parameter_learns
# fault: fine-tuning of a head on a frozen backbone: the backbone has requires_grad=False and stays in eval mode on purpose
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(77)


class Classifier(nn.Module):
    def __init__(self, backbone, classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, classes))
        for p in self.backbone.parameters():
            p.requires_grad_(False)
        nn.init.normal_(self.head[2].weight, std=0.02)
        nn.init.zeros_(self.head[2].bias)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


backbone = nn.Sequential(
    nn.Conv1d(2, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten()
)
label = torch.randint(0, 4, (960,))
t = torch.linspace(0, 1, 32)
signal = torch.sin(6.28 * t * (2 + 2 * label[:, None]) + 6.28 * torch.rand(960, 1)).unsqueeze(1)
signal = torch.cat([signal, signal.abs()], 1) + 0.1 * torch.randn(960, 2, 32)
loader = DataLoader(TensorDataset(signal, label), batch_size=32, shuffle=True)

model = Classifier(backbone, 4)
model.train()
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=5e-3)
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
