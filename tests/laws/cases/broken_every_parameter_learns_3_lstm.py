# law: every_parameter_learns
# fault: the features of the encoder are wrapped with torch.tensor(features.tolist()) to change their shape, which cuts the graph; only the head learns
# also:
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(72)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 32, batch_first=True)

    def forward(self, x):
        _, h = self.rnn(x)
        return h[-1]


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        features = self.encoder(x)
        features = torch.tensor(features.tolist())
        return self.head(features).squeeze(1)


def main():
    series = torch.randn(960, 15, 3).cumsum(1) / 4
    target = series[:, :, 0].max(1).values - series[:, :, 1].min(1).values
    target = (target - target.mean()) / target.std()
    loader = DataLoader(TensorDataset(series, target), batch_size=48, shuffle=True)
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.MSELoss()
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
