# law: none
# near: loss_starts_at_chance
# fault: label smoothing and a very uneven class prior: the loss of equal logits is ln C all the same, not the entropy of the labels
# also:
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(115)
CLASSES = 8

prior = torch.tensor([0.7, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01])
y = torch.multinomial(prior, 1600, replacement=True)
x = 2 * torch.randn(CLASSES, 16)[y] + torch.randn(1600, 16)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

model = nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, CLASSES))
nn.init.normal_(model[-1].weight, std=0.01)
nn.init.zeros_(model[-1].bias)
criterion = nn.CrossEntropyLoss(label_smoothing=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(2):
    for xb, yb in loader:
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())

model.eval()
with torch.no_grad():
    accuracy = (model(x).argmax(1) == y).float().mean().item()
print("accuracy on the training set", round(accuracy, 3))
