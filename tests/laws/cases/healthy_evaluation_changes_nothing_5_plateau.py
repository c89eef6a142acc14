# law: none
# near: evaluation_changes_nothing
# fault: after the evaluation the scheduler lowers the learning rate on a plateau and the best weights are copied; both are decisions after the evaluation, not side effects of it
# also:
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(149)


class LSTMRegressor(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.lstm = nn.LSTM(2, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1]).squeeze(1)


# the adding problem: the sum of the two marked numbers
n, T = 760, 10
values, marks = torch.rand(n, T), torch.zeros(n, T)
for i in range(n):
    marks[i, torch.randperm(T)[:2]] = 1.0
y = (values * marks).sum(1)
y = (y - y.mean()) / y.std()
x = torch.stack([values, marks], 2)
train = DataLoader(TensorDataset(x[:640], y[:640]), batch_size=32, shuffle=True)
valid = DataLoader(TensorDataset(x[640:], y[640:]), batch_size=120)
model = LSTMRegressor()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
criterion = nn.MSELoss()
best, best_value = None, float("inf")


@torch.no_grad()
def evaluate():
    model.eval()
    value = sum(criterion(model(a), b).item() for a, b in valid) / len(valid)
    model.train()
    return value


for epoch in range(3):
    for xb, yb in train:
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    value = evaluate()
    scheduler.step(value)
    if value < best_value:
        best, best_value = copy.deepcopy(model.state_dict()), value
    print(f"epoch {epoch} validation {value:.4f} lr {optimizer.param_groups[0]['lr']}")
