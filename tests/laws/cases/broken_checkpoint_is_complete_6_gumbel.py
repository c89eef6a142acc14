# law: checkpoint_is_complete
# fault: the temperature of the softmax over codes is annealed by the loop in a plain float of the model; a loaded model decodes with the initial temperature
# also:
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(155)


class CategoricalAutoencoder(nn.Module):
    def __init__(self, dim=16, groups=3, words=8):
        super().__init__()
        self.groups, self.words = groups, words
        self.temperature = 3.0
        self.encoder = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, groups * words))
        self.decoder = nn.Sequential(nn.Linear(groups * words, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        logits = self.encoder(x).view(-1, self.groups, self.words)
        code = F.softmax(logits / self.temperature, dim=-1)
        return self.decoder(code.flatten(1))


centers = torch.randn(20, 16)
data = centers[torch.randint(0, 20, (1280,))] + 0.2 * torch.randn(1280, 16)
data = (data - data.mean(0)) / data.std(0)
loader = DataLoader(TensorDataset(data), batch_size=64, shuffle=True)
model = CategoricalAutoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    for (x,) in loader:
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.temperature = max(0.3, model.temperature * 0.95)
    torch.save(model.state_dict(), io.BytesIO())
    print(f"epoch {epoch} loss {loss.item():.4f} temperature {model.temperature:.2f}")
