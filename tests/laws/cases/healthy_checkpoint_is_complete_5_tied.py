# law: none
# near: checkpoint_is_complete
# fault: a tied autoencoder uses the transposed weights of its encoder, so state_dict holds one matrix for two layers and the decoder has a bias only
# also:
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(160)


class TiedAutoencoder(nn.Module):
    def __init__(self, dim=28, hidden=96, code=12):
        super().__init__()
        self.first, self.second = nn.Linear(dim, hidden), nn.Linear(hidden, code)
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(hidden)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        code = self.second(torch.tanh(self.first(x)))
        h = torch.tanh(F.linear(code, self.second.weight.T, self.bias1))
        return F.linear(h, self.first.weight.T, self.bias2)


data = torch.tanh(torch.randn(1600, 5) @ torch.randn(5, 28) / 2)
data = (data - data.mean(0)) / data.std(0)
loader = DataLoader(TensorDataset(data), batch_size=64, shuffle=True)
model = TiedAutoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    for (x,) in loader:
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), io.BytesIO())
    print("epoch", epoch, "loss", loss.item())
