# law: none
# near: one_batch_can_be_learned
# fault: the evidence bound of a VAE with a Gaussian decoder of fixed variance keeps the KL term of a useful code, so its loss stays well above zero on one batch
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(127)


class VAE(nn.Module):
    def __init__(self, dim=32, hidden=96, z=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 2 * z))
        self.decoder = nn.Sequential(nn.Linear(z, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return {"reconstruction": self.decoder(z), "mu": mu, "logvar": logvar}


def negative_elbo(x, out):
    recon = F.mse_loss(out["reconstruction"], x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + out["logvar"] - out["mu"] ** 2 - out["logvar"].exp()).sum(1).mean()
    return (recon + kl) / x.size(1)


data = torch.randn(1280, 4) @ torch.randn(4, 32) + 0.2 * torch.randn(1280, 32)
data = (data - data.mean(0)) / data.std(0)
loader = DataLoader(TensorDataset(data), batch_size=64, shuffle=True)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(3):
    for (x,) in loader:
        loss = negative_elbo(x, model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
