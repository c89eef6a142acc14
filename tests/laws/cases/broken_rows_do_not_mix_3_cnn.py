# law: rows_do_not_mix
# fault: the weights of the attention pooling are a softmax over dim=0, the batch, instead of over the places of the image
# also: halves_make_a_whole
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(22)


class AttentionPoolNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
        )
        self.score = nn.Conv2d(32, 1, 1)
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        f = self.features(x).flatten(2).transpose(1, 2)  # (batch, places, channels)
        s = f @ self.score.weight.view(-1, 1) + self.score.bias
        weight = F.softmax(s, dim=0)
        return self.fc((weight * f).sum(1))


def main():
    n = 640
    label = torch.randint(0, 4, (n,))
    images = 0.3 * torch.randn(n, 1, 12, 12)
    for i, c in enumerate(label.tolist()):
        row, col = torch.randint(0, 8, (2,)).tolist()
        patch = torch.zeros(4, 4)
        patch[c % 2 :: 2] = 1.5
        images[i, 0, row : row + 4, col : col + 4] += patch if c < 2 else patch.T

    loader = DataLoader(TensorDataset(images, label), batch_size=32, shuffle=True)
    net = AttentionPoolNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(3):
        running = 0.0
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            running += loss.item()
        print(f"[{epoch}] {running / len(loader):.4f}")


if __name__ == "__main__":
    main()
