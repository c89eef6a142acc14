# law: loss_starts_at_chance
# fault: the targets are prices in thousands and are not standardised, so the loss starts at the mean squared, many times their variance
# also: one_batch_can_be_learned
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(111)

area = 50 + 100 * torch.rand(1000)
rooms = (area / 30 + torch.rand(1000)).floor()
age = 60 * torch.rand(1000)
price = 120 + 2.1 * area + 8 * rooms - 0.7 * age + 10 * torch.randn(1000)
features = torch.stack([area, rooms, age], 1)
features = (features - features.mean(0)) / features.std(0)

loader = DataLoader(TensorDataset(features, price.unsqueeze(1)), batch_size=50, shuffle=True)
model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.MSELoss()
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.1f}")

model.eval()
with torch.no_grad():
    error = (model(features).squeeze(1) - price).abs().mean().item()
print(f"mean absolute error {error:.1f}")
