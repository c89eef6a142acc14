# law: precision_is_enough
# fault: the recurrence of the scan runs in bfloat16, where a decay of 0.998 rounds to 1 and small drives vanish next to a large state
# also: loss_starts_at_chance
import torch
from torch import nn

torch.manual_seed(172)
T, D, B = 96, 16, 24


class LinearScan(nn.Module):
    """A diagonal state space layer with long memory."""

    def __init__(self, inputs=2):
        super().__init__()
        self.inp = nn.Linear(inputs, D)
        self.rate = nn.Parameter(torch.linspace(-6.9, -5.5, D))
        self.out = nn.Linear(D, 1)

    def forward(self, x):
        u = self.inp(x.to(self.inp.weight.dtype))
        decay = torch.exp(-torch.exp(self.rate))
        drive = u * (1 - decay)
        h = torch.ones(x.size(0), D, dtype=u.dtype)
        for t in range(x.size(1)):
            h = decay * h + drive[:, t]
        return self.out(20 * (h - 1)).squeeze(-1)


def get_batch():
    x = torch.randn(B, T, 2)
    level = torch.randn(B, 1)
    x[:, :, 0] = level + 0.1 * x[:, :, 0]
    return x, level.squeeze(1)


def main():
    STEPS = 40
    model = LinearScan().to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = get_batch()
        loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
