# law: checkpoint_is_complete
# fault: the mean and scale of the input normaliser are plain tensors, set by fit() from the data, not buffers; a loaded model normalises with zeros and ones
# also:
import io

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(150)


class Standardise(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mean, self.std = torch.zeros(dim), torch.ones(dim)

    def fit(self, x):
        self.mean, self.std = x.mean(0), x.std(0)

    def forward(self, x):
        return (x - self.mean) / self.std


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalise = Standardise(5)
        self.net = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(self.normalise(x))


def main():
    x = torch.randn(960, 5) * torch.tensor([1.0, 10.0, 100.0, 0.1, 5.0]) + torch.tensor([0.0, 50.0, -300.0, 1.0, 2.0])
    z = (x - x.mean(0)) / x.std(0)
    y = torch.sin(z[:, :1]) + z[:, 1:2] * z[:, 2:3]
    y = (y - y.mean()) / y.std()
    loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True)
    model = Model()
    model.normalise.fit(x)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        checkpoint = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
        print("epoch", epoch, "loss", loss.item(), "checkpoint of", checkpoint.tell(), "bytes")


if __name__ == "__main__":
    main()
