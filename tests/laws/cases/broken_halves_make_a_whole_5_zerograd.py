# law: halves_make_a_whole
# fault: zero_grad is inside the inner loop of accumulation, so only the last micro-batch reaches the step, scaled down by four
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(86)
MICRO, B = 4, 16


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(16 * 25, 48), nn.ReLU(), nn.Linear(48, 3))

    def forward(self, x):
        return self.fc(self.conv(x))


def get_batch():
    y = torch.randint(0, 3, (B,))
    ramp = torch.linspace(-1, 1, 10)
    base = torch.stack([ramp[None, :].expand(10, 10), ramp[:, None].expand(10, 10), ramp[None] * ramp[:, None]])
    return base[y].unsqueeze(1) + 0.5 * torch.randn(B, 1, 10, 10), y


def main():
    model = SmallCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    STEPS = 25
    for step in range(STEPS):
        running = 0.0
        for micro in range(MICRO):
            x, y = get_batch()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) / MICRO
            loss.backward()
            running += loss.item()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {running:.3f}")


if __name__ == "__main__":
    main()
