# law: one_batch_can_be_learned
# fault: predictions have shape (batch, 1) and targets (batch,), so the error broadcasts to a (batch, batch) table whose best answer is the mean; torch only warns when the functional loss is used
# also: halves_make_a_whole, input_matters
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(120)

x = torch.randn(1280, 7)
y = torch.sin(x[:, 0] * 2) + x[:, 1] - 0.5 * x[:, 2] ** 2
y = (y - y.mean()) / y.std()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(3):
    for xb, yb in loader:
        prediction = model(xb)
        loss = ((prediction - yb) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", round(loss.item(), 4))

model.eval()
with torch.no_grad():
    prediction = model(x).squeeze(1)
    explained = 1 - (prediction - y).var() / y.var()
print("spread of the predictions", round(prediction.std().item(), 4))
print("explained variance", round(explained.item(), 4))
