# law: none
# near: input_matters
# fault: in an autoencoder the input is also the target, so a permuted batch carries its targets along and leaves the loss alone
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(65)


class Autoencoder(nn.Module):
    def __init__(self, dim=32, code=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 128), nn.GELU(), nn.Linear(128, code))
        self.decoder = nn.Sequential(nn.Linear(code, 128), nn.GELU(), nn.Linear(128, dim))

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code), code


def main():
    latent = torch.randn(2000, 6)
    data = torch.tanh(latent @ torch.randn(6, 32) / 2)
    data = (data - data.mean(0)) / data.std(0)
    loader = DataLoader(TensorDataset(data), batch_size=64, shuffle=True, drop_last=True)

    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for (x,) in loader:
            reconstruction, code = model(x)
            loss = F.mse_loss(reconstruction, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} error {loss.item():.4f} code norm {code.norm(dim=1).mean().item():.2f}")


if __name__ == "__main__":
    main()
