# law: evaluation_changes_nothing
# fault: model.eval() in the validation function and model.train() only once before the loop over epochs, so from the second epoch on dropout is off and BatchNorm is fixed
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(140)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)
        )
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(12 * 25, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 3))

    def forward(self, x):
        return self.fc(self.conv(x))


def validate(model, loader):
    model.eval()
    right = total = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
            total += len(y)
    return right / total


def main():
    n = 600
    y = torch.randint(0, 3, (n,))
    x = 0.7 * torch.randn(n, 1, 10, 10)
    for i, k in enumerate(y.tolist()):
        x[i, 0, 3 * k : 3 * k + 3, 3 * k : 3 * k + 3] += 1.5
    train = DataLoader(TensorDataset(x[:480], y[:480]), batch_size=32, shuffle=True)
    valid = DataLoader(TensorDataset(x[480:], y[480:]), batch_size=60)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for epoch in range(3):
        for xb, yb in train:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.3f} accuracy {validate(model, valid):.3f}")


if __name__ == "__main__":
    main()
