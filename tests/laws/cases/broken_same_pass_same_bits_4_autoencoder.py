# law: same_pass_same_bits
# fault: the denoising noise comes from a fresh np.random.default_rng() in every forward, which is seeded by the operating system and ignores every seed of the script
# also: order_does_not_matter, halves_make_a_whole, checkpoint_is_complete, precision_is_enough, evaluation_changes_nothing
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

np.random.seed(3)
torch.manual_seed(3)


class DenoisingAutoencoder(nn.Module):
    def __init__(self, dim=32, hidden=64, code=8, sigma=0.3):
        super().__init__()
        self.sigma = sigma
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def corrupt(self, x):
        noise = np.random.default_rng().normal(0.0, self.sigma, size=tuple(x.shape))
        return x + torch.from_numpy(noise).float()

    def forward(self, x):
        if self.training:
            x = self.corrupt(x)
        return self.decoder(self.encoder(x))


latent = torch.randn(2000, 5)
data = torch.tanh(latent @ torch.randn(5, 32))
data = (data - data.mean(0)) / data.std(0)
loader = DataLoader(TensorDataset(data), batch_size=100, shuffle=True)

model = DenoisingAutoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loss_fn = nn.MSELoss()
for epoch in range(2):
    for (clean,) in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(clean), clean)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: reconstruction error {loss.item():.4f}")
