# law: none
# near: same_pass_same_bits
# fault: noise and time steps come from the script's own torch.Generator, not from the global random numbers; this is right and fully seeded
# also:
import torch
from torch import nn

torch.manual_seed(13)
noise_rng = torch.Generator().manual_seed(99)
STEPS, TIMES, DIM = 60, 100, 2

beta = torch.linspace(1e-4, 0.05, TIMES)
alpha_bar = torch.cumprod(1 - beta, 0)


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Embedding(TIMES, width)
        self.inp = nn.Linear(DIM, width)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, DIM)

    def forward(self, x, t):
        return self.out(self.mid(self.inp(x) + self.time(t)))


angle = torch.rand(4000) * 6.283
points = torch.stack([angle.cos(), angle.sin()], 1) * (1 + 0.05 * torch.randn(4000, 1))


def diffusion_loss(model, x0):
    t = torch.randint(0, TIMES, (len(x0),), generator=noise_rng)
    eps = torch.randn(x0.shape, generator=noise_rng)
    a = alpha_bar[t][:, None]
    xt = a.sqrt() * x0 + (1 - a).sqrt() * eps
    return (model(xt, t) - eps).pow(2).mean()


def main():
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        batch = points[torch.randint(0, len(points), (128,))]
        loss = diffusion_loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
