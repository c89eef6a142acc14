# law: none
# near: one_batch_can_be_learned
# fault: all rows start with the same token and their next token is drawn at random, so the first position keeps its entropy in any model
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(130)
V, T, B, BOS = 24, 8, 32, 0


class GRULM(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.embed = nn.Embedding(V, 48)
        self.gru = nn.GRU(48, hidden, batch_first=True)
        self.head = nn.Linear(hidden, V)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, idx):
        return self.head(self.gru(self.embed(idx))[0])


def get_batch():
    start = torch.randint(0, V - 1, (B, 1))
    body = (start * 5 + start * torch.arange(T)) % (V - 1) + 1
    seq = torch.cat([torch.full((B, 1), BOS), body], 1)
    return seq[:, :-1], seq[:, 1:]


STEPS = 60
model = GRULM()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x).reshape(-1, V), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item())
