# law: halves_make_a_whole
# fault: class weights are computed from the class counts of the batch, so the weight of an example depends on which others came with it
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(85)
CLASSES = 4

prior = torch.tensor([0.6, 0.25, 0.1, 0.05])
label = torch.multinomial(prior, 1600, replacement=True)
centers = torch.randn(CLASSES, 12)
x = centers[label] + torch.randn(1600, 12)
loader = DataLoader(TensorDataset(x, label), batch_size=64, shuffle=True)


def balanced_cross_entropy(logits, target):
    count = torch.bincount(target, minlength=CLASSES).clamp(min=1).float()
    weight = len(target) / (CLASSES * count)
    nll = F.cross_entropy(logits, target, reduction="none")
    return (weight[target] * nll).mean()


model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, CLASSES))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(3):
    for xb, yb in loader:
        loss = balanced_cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", round(loss.item(), 4))
