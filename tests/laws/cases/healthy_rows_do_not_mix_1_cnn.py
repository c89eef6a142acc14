# law: none
# near: rows_do_not_mix
# fault: BatchNorm in train mode mixes rows by design; this is the declared exception
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(25)


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))


def main():
    net = nn.Sequential(block(1, 16), block(16, 32), nn.Flatten(), nn.Linear(32 * 9, 4))
    nn.init.normal_(net[-1].weight, std=0.01)
    nn.init.zeros_(net[-1].bias)

    n = 768
    label = torch.randint(0, 4, (n,))
    grid = torch.linspace(-1, 1, 12)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    angle = label * torch.pi / 4 + 0.1 * torch.randn(n)
    wave = torch.sin(6 * (angle.cos()[:, None, None] * xx + angle.sin()[:, None, None] * yy) + torch.rand(n, 1, 1) * 6.28)
    images = (wave + 0.4 * torch.randn(n, 12, 12)).unsqueeze(1)

    train = DataLoader(TensorDataset(images[:640], label[:640]), batch_size=32, shuffle=True, drop_last=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for epoch in range(2):
        net.train()
        for x, y in train:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            accuracy = (net(images[640:]).argmax(1) == label[640:]).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.3f} validation accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
