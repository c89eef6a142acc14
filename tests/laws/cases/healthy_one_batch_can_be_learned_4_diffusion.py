# law: none
# near: one_batch_can_be_learned
# fault: noise and time steps are new in each step, so the loss on one batch falls to the part of the noise that no network can know, not to zero
# also:
import torch
from torch import nn

torch.manual_seed(129)
SIDE, TIMES, B = 8, 50, 32
alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.1, TIMES), 0)


class ConvDenoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.time = nn.Embedding(TIMES, width)
        self.inp = nn.Conv2d(1, width, 3, padding=1)
        self.mid1 = nn.Conv2d(width, width, 3, padding=1)
        self.mid2 = nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)[:, :, None, None]
        h = h + self.mid1(torch.nn.functional.silu(h))
        h = h + self.mid2(torch.nn.functional.silu(h))
        return self.out(torch.nn.functional.silu(h))


def get_batch():
    grid = torch.linspace(-1, 1, SIDE)
    slope = torch.randn(B, 2, 1, 1)
    image = torch.tanh(2 * (slope[:, 0] * grid[None, :, None] + slope[:, 1] * grid[None, None, :]))
    return image.unsqueeze(1)


def main():
    STEPS = 60
    model = ConvDenoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        x0 = get_batch()
        t = torch.randint(0, TIMES, (B,))
        a = alpha_bar[t][:, None, None, None]
        noise = torch.randn_like(x0)
        loss = (model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
