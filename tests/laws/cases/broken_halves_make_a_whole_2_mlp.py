# law: halves_make_a_whole
# fault: the loss is not divided by the number of accumulated micro-batches, so the gradient is four times that of the whole batch
# also:
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(83)
accumulation_steps = 4

x = torch.randn(1600, 10)
y = torch.sin(x[:, :1] * 2) + x[:, 1:2] * x[:, 2:3]
y = (y - y.mean()) / y.std()
loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()

model.zero_grad()
for epoch in range(2):
    for i, (inputs, labels) in enumerate(loader):
        predictions = model(inputs)
        loss = criterion(predictions, labels)
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            model.zero_grad()
    print("epoch", epoch, "loss", loss.item())

model.eval()
with torch.no_grad():
    error = criterion(model(x[:200]), y[:200]).item()
print("error on 200 rows of the training set", round(error, 4))
