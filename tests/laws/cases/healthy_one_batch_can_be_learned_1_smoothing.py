# law: none
# near: one_batch_can_be_learned
# fault: with label smoothing of 0.2 the loss has a floor of about 0.9 of 2.3; what lies above the floor is learned from one batch completely
# also:
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(126)
CLASSES = 10
centers = torch.randn(CLASSES, 20)
y = torch.randint(0, CLASSES, (1280,))
x = 1.5 * centers[y] + torch.randn(1280, 20)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(20, 128), nn.GELU(), nn.Linear(128, CLASSES))
nn.init.normal_(model[2].weight, std=0.02)
nn.init.zeros_(model[2].bias)
criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(3):
    for xb, yb in loader:
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())

model.eval()
with torch.no_grad():
    probability = model(x).softmax(1).amax(1)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
print("accuracy", round(accuracy, 3), "confidence", round(probability.mean().item(), 3))
