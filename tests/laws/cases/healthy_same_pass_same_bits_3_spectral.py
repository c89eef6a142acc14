# law: none
# near: same_pass_same_bits
# fault: spectral norm runs one power iteration per forward in train mode and keeps its vectors in buffers, as the paper on it asks; with buffers rolled back the bits agree
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(12)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            spectral_norm(nn.Linear(16, 64)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(64, 64)),
            nn.LeakyReLU(0.2),
        )
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


mix = torch.randn(16, 16) / 4


def get_batch(n=64):
    label = (torch.rand(n) < 0.5).float()
    real = torch.randn(n, 16) @ mix * 2 + 0.5
    fake = torch.randn(n, 16)
    return torch.where(label[:, None] > 0, real, fake), label


STEPS = 50
model = Critic()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.5, 0.99))
for step in range(STEPS):
    x, label = get_batch()
    loss = F.binary_cross_entropy_with_logits(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print("step", step, "loss", round(loss.item(), 4))
