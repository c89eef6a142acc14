# law: none
# near: halves_make_a_whole
# fault: even accumulation with the loss divided by the number of micro-batches, and a short last group divided by its own size
# also:
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(89)
ACCUM = 4

x = torch.randn(440, 12)
y = torch.tanh(x[:, :2].sum(1)) - 0.5 * x[:, 2] * x[:, 3]
y = (y - y.mean()) / y.std()
loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
model = nn.Sequential(nn.Linear(12, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.MSELoss()

for epoch in range(4):
    optimizer.zero_grad()
    for i, (xb, yb) in enumerate(loader):
        group = min(ACCUM, len(loader) - i // ACCUM * ACCUM)
        loss = criterion(model(xb).squeeze(1), yb)
        (loss / group).backward()
        if (i + 1) % ACCUM == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    print("epoch", epoch, "loss", loss.item())

model.eval()
with torch.no_grad():
    print("final", criterion(model(x).squeeze(1), y).item())
