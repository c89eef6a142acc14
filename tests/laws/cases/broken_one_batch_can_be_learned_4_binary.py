# law: one_batch_can_be_learned
# fault: nn.Softmax(dim=1) over a single output is always 1, so the loss is a constant and every gradient is zero
# also: every_parameter_learns, loss_starts_at_chance, input_matters
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(123)

x = torch.randn(960, 10)
y = ((x[:, 0] + x[:, 1] * x[:, 2]) > 0).float().unsqueeze(1)
loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True)


class Churn(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(10, 64), nn.Linear(64, 32), nn.Linear(32, 1)
        self.output = nn.Softmax(dim=1)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return self.output(self.fc3(x))


model = Churn()
criterion = nn.BCELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2):
    right = 0
    for xb, yb in loader:
        prediction = model(xb)
        loss = criterion(prediction, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += ((prediction > 0.5) == yb).sum().item()
    print(f"epoch {epoch} loss {loss.item():.3f} accuracy {right / len(x):.3f}")
