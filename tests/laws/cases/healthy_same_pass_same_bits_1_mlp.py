# law: none
# near: same_pass_same_bits
# fault: dropout and BatchNorm in train mode make two passes differ only by the global random numbers and by buffers, which a check can rewind
# also:
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(10)
x = torch.randn(1200, 20)
teacher = torch.randn(20, 6)
y = (x @ teacher).argmax(1)
train = DataLoader(TensorDataset(x, y), batch_size=60, shuffle=True)

model = nn.Sequential(
    nn.Linear(20, 128, bias=False),
    nn.BatchNorm1d(128),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(128, 64, bias=False),
    nn.BatchNorm1d(64),
    nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(64, 6),
)
nn.init.normal_(model[-1].weight, std=0.01)
nn.init.zeros_(model[-1].bias)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)

for epoch in range(3):
    model.train()
    for xb, yb in train:
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
