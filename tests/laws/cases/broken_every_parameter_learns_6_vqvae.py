# law: every_parameter_learns
# fault: the quantised code is used without the straight-through copy, so argmin stops the gradient and only the commitment term could train the encoder, which is missing too
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(75)


class VQAutoencoder(nn.Module):
    def __init__(self, dim=20, code=6, words=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, code))
        self.codebook = nn.Embedding(words, code)
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.ReLU(), nn.Linear(64, dim))
        nn.init.normal_(self.codebook.weight, std=0.2)

    def forward(self, x):
        z = self.encoder(x)
        index = torch.cdist(z, self.codebook.weight).argmin(1)
        quantised = self.codebook(index)
        return self.decoder(quantised), z, quantised


centers = 1.5 * torch.randn(12, 20)
data = centers[torch.randint(0, 12, (1600,))] + 0.3 * torch.randn(1600, 20)
data = (data - data.mean(0)) / data.std(0)
loader = DataLoader(TensorDataset(data), batch_size=80, shuffle=True)
model = VQAutoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(3):
    for (x,) in loader:
        reconstruction, z, quantised = model(x)
        loss = F.mse_loss(reconstruction, x) + F.mse_loss(quantised, z.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
