# law: none
# near: halves_make_a_whole
# fault: cross entropy with weight= and reduction="mean" divides by the sum of the weights of its targets; the halves agree with the whole under those weights, not under row counts
# also:
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(90)
CLASSES = 4

prior = torch.tensor([0.6, 0.25, 0.1, 0.05])
label = torch.multinomial(prior, 1600, replacement=True)
centers = torch.randn(CLASSES, 12)
x = 1.5 * centers[label] + torch.randn(1600, 12)
loader = DataLoader(TensorDataset(x, label), batch_size=64, shuffle=True)

model = nn.Sequential(nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, CLASSES))
nn.init.normal_(model[2].weight, std=0.02)
nn.init.zeros_(model[2].bias)
criterion = nn.CrossEntropyLoss(weight=1 / prior)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    for xb, yb in loader:
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", round(loss.item(), 4))

model.eval()
with torch.no_grad():
    hit = model(x).argmax(1) == label
recall = [round(hit[label == c].float().mean().item(), 3) for c in range(CLASSES)]
print("recall by class", recall)
