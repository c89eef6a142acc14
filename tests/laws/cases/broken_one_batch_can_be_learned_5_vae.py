# law: one_batch_can_be_learned
# fault: the reconstruction error is a mean over all entries but the KL term is a sum over batch and latent, so the KL wins by a factor of thousands and the code says nothing
# also: halves_make_a_whole
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(124)


class VAE(nn.Module):
    def __init__(self, dim=32, hidden=64, z=6):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.mu, self.logvar = nn.Linear(hidden, z), nn.Linear(hidden, z)
        self.fc3, self.fc4 = nn.Linear(z, hidden), nn.Linear(hidden, dim)
        for layer in (self.mu, self.logvar):
            nn.init.normal_(layer.weight, std=1e-3)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.fc4(torch.relu(self.fc3(z))), mu, logvar


def loss_function(recon, x, mu, logvar):
    error = F.mse_loss(recon, x)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return error + kld


data = torch.tanh(torch.randn(1280, 6) @ torch.randn(6, 32))
data = (data - data.mean(0)) / data.std(0)
loader = DataLoader(TensorDataset(data), batch_size=64, shuffle=True)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    for (x,) in loader:
        recon, mu, logvar = model(x)
        loss = loss_function(recon, x, mu, logvar)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
