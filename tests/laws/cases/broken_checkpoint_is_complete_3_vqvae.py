# law: checkpoint_is_complete
# fault: the codebook is learned by moving averages and kept in plain attributes, not in buffers, so the checkpoint of this autoencoder has no codebook
# also: same_pass_same_bits
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(152)


class EMAQuantizer(nn.Module):
    def __init__(self, words=24, dim=6, decay=0.9):
        super().__init__()
        self.decay = decay
        self.codebook = 0.3 * torch.randn(words, dim)
        self.count = torch.ones(words)
        self.total = self.codebook.clone()

    def forward(self, z):
        index = torch.cdist(z, self.codebook).argmin(1)
        quantised = self.codebook[index]
        if self.training:
            with torch.no_grad():
                onehot = F.one_hot(index, len(self.codebook)).float()
                self.count = self.decay * self.count + (1 - self.decay) * onehot.sum(0)
                self.total = self.decay * self.total + (1 - self.decay) * onehot.T @ z
                self.codebook = self.total / self.count.clamp(min=1e-3).unsqueeze(1)
        commitment = F.mse_loss(z, quantised.detach())
        return z + (quantised - z).detach(), commitment


class VQVAE(nn.Module):
    def __init__(self, dim=20):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 6))
        self.quantizer = EMAQuantizer()
        self.decoder = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        quantised, commitment = self.quantizer(self.encoder(x))
        return self.decoder(quantised), commitment


def main():
    centers = torch.randn(10, 20)
    data = centers[torch.randint(0, 10, (1600,))] + 0.2 * torch.randn(1600, 20)
    data = (data - data.mean(0)) / data.std(0)
    loader = DataLoader(TensorDataset(data), batch_size=80, shuffle=True)
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for (x,) in loader:
            reconstruction, commitment = model(x)
            loss = F.mse_loss(reconstruction, x) + 0.25 * commitment
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "loss", loss.item())
    torch.save(model.state_dict(), io.BytesIO())


if __name__ == "__main__":
    main()
