# law: every_parameter_learns
# fault: the hidden layers are in a plain Python list, not an nn.ModuleList, so model.parameters() and the optimizer never see them
# also: checkpoint_is_complete
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(70)


class DeepMLP(nn.Module):
    def __init__(self, sizes, classes):
        super().__init__()
        self.layers = []
        for a, b in zip(sizes[:-1], sizes[1:]):
            self.layers.append(nn.Linear(a, b))
        self.classifier = nn.Linear(sizes[-1], classes)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.classifier(x)


x = torch.randn(1280, 16)
y = ((x[:, :4] ** 2).sum(1) > 3.36).long() + 2 * (x[:, 4] * x[:, 5] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = DeepMLP([16, 64, 64, 64], 4)
print("parameters:", sum(p.numel() for p in model.parameters()))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(3):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
