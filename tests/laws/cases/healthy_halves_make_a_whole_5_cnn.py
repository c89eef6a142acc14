# law: none
# near: halves_make_a_whole
# fault: BatchNorm makes the loss of the halves differ from that of the whole, under accumulation too; this is the named exception
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(92)
ACCUM = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 4, 4)
        nn.init.normal_(self.fc.weight, std=0.02)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.adaptive_avg_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


y = torch.randint(0, 4, (960,))
x = 0.5 * torch.randn(960, 2, 8, 8)
for i, k in enumerate(y.tolist()):
    x[i, k % 2, :, (k // 2) * 4 : (k // 2) * 4 + 4] += 0.8
loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(2):
    for i, (xb, yb) in enumerate(loader):
        loss = F.cross_entropy(model(xb), yb) / ACCUM
        loss.backward()
        if (i + 1) % ACCUM == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    print("epoch", epoch, "loss", ACCUM * loss.item())
