# law: halves_make_a_whole
# fault: an epoch of 10 micro-batches with groups of 4 ends in a group of 2 that is still divided by 4, so its gradient is half of what it should be
# also:
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(87)
ACCUM = 4

x = torch.randn(400, 14)
y = (x @ torch.randn(14, 5) + 0.3 * torch.randn(400, 5)).argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)
model = nn.Sequential(nn.Linear(14, 64), nn.GELU(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
criterion = nn.CrossEntropyLoss()

for epoch in range(8):
    optimizer.zero_grad()
    for i, (xb, yb) in enumerate(loader):
        loss = criterion(model(xb), yb) / ACCUM
        loss.backward()
        if (i + 1) % ACCUM == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    print("epoch", epoch, "loss", loss.item() * ACCUM)

model.eval()
with torch.no_grad():
    accuracy = (model(x).argmax(1) == y).float().mean().item()
print("accuracy on the training set", round(accuracy, 3))
