# law: checkpoint_is_complete
# fault: the random frequencies of the Fourier features are drawn in the constructor and kept as a plain tensor; a new model that loads the weights has other frequencies
# also:
import os
import tempfile

import torch
from torch import nn

torch.manual_seed(153)
B = 128


class FourierField(nn.Module):
    def __init__(self, features=48, scale=2.0):
        super().__init__()
        self.frequencies = scale * torch.randn(2, features)
        self.net = nn.Sequential(nn.Linear(2 * features, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, xy):
        angle = 6.28 * xy @ self.frequencies
        return self.net(torch.cat([angle.sin(), angle.cos()], -1)).squeeze(-1)


def picture(xy):
    value = torch.sin(9 * xy[:, 0]) * torch.cos(7 * xy[:, 1]) + (xy.norm(dim=1) < 0.6).float()
    return (value - 0.3) / 0.6


def get_batch():
    xy = 2 * torch.rand(B, 2) - 1
    return xy, picture(xy)


def main():
    model = FourierField()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    folder = tempfile.TemporaryDirectory()
    STEPS = 80
    for step in range(STEPS):
        xy, value = get_batch()
        loss = (model(xy) - value).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            torch.save(model.state_dict(), os.path.join(folder.name, "last.pt"))
            print(step, loss.item())


if __name__ == "__main__":
    main()
