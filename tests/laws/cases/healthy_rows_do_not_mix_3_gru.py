# law: none
# near: rows_do_not_mix
# fault: a time-first GRU with a real transpose: rows are at dimension 1 inside the network and at dimension 0 outside
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(27)
T, FEATURES, B = 20, 4, 40


class Forecaster(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.gru = nn.GRU(FEATURES, hidden)
        self.out = nn.Linear(hidden, FEATURES)

    def forward(self, series):  # (time, batch, features), as the loader gives it
        out, last = self.gru(series)
        return self.out(last[-1])


def collate(rows):
    x = torch.stack([r[0] for r in rows], dim=1)  # time first
    y = torch.stack([r[1] for r in rows])
    return x, y


class Waves(torch.utils.data.Dataset):
    def __init__(self, n):
        t = torch.arange(T + 1).float()
        frequency = 0.2 + 0.5 * torch.rand(n, 1, FEATURES)
        phase = 6.28 * torch.rand(n, 1, FEATURES)
        self.wave = 1.4 * torch.sin(frequency * t[None, :, None] + phase)

    def __len__(self):
        return len(self.wave)

    def __getitem__(self, i):
        return self.wave[i, :T], self.wave[i, T]


loader = torch.utils.data.DataLoader(Waves(800), batch_size=B, shuffle=True, collate_fn=collate)
model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"epoch {epoch} mse {loss.item():.4f}")
