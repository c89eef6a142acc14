# law: every_parameter_learns
# fault: the optimizer was built from the encoder's parameters alone, left over from a version with two optimizers; the decoder keeps its initial weights
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(71)


class VAE(nn.Module):
    def __init__(self, dim=24, hidden=64, z=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 2 * z))
        self.decoder = nn.Sequential(nn.Linear(z, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(z), mu, logvar


def elbo_loss(x, reconstruction, mu, logvar):
    recon = F.mse_loss(reconstruction, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return recon + 0.1 * kl


def main():
    data = torch.randn(1600, 4) @ torch.randn(4, 24) / 2 + 0.1 * torch.randn(1600, 24)
    loader = DataLoader(TensorDataset(data), batch_size=64, shuffle=True)
    vae = VAE()
    optimizer = torch.optim.Adam(vae.encoder.parameters(), lr=2e-3)
    for epoch in range(2):
        for (x,) in loader:
            loss = elbo_loss(x, *vae(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "loss", loss.item())


if __name__ == "__main__":
    main()
