# law: none
# near: every_parameter_learns
# fault: in a GAN the discriminator's step leaves the generator alone and the generator's step leaves gradients in the discriminator that are thrown away; a low loss is not the aim of either
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(211)
Z, DIM, B = 4, 2, 64
generator = nn.Sequential(nn.Linear(Z, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, DIM))
critic = nn.Sequential(nn.Linear(DIM, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))


def real_batch():
    corner = torch.randint(0, 2, (B, DIM)).float() * 2 - 1
    return corner + 0.1 * torch.randn(B, DIM)


for step in range(80):
    real, fake = real_batch(), generator(torch.randn(B, Z))
    d_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()

    g_loss = F.softplus(-critic(generator(torch.randn(B, Z)))).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 20 == 0:
        print(f"step {step} critic {d_loss.item():.3f} generator {g_loss.item():.3f}")
