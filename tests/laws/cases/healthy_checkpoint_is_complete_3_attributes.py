# law: none
# near: checkpoint_is_complete
# fault: plain attributes change with every pass (last attention map, auxiliary loss, number of calls), but no output depends on what they held before
# also:
import io

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(158)
V, T, D, B, CLASSES = 30, 12, 48, 32, 4


class PoolingEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.query = nn.Parameter(0.1 * torch.randn(D))
        self.mlp = nn.Sequential(nn.Linear(D, 96), nn.GELU(), nn.Linear(96, CLASSES))
        nn.init.normal_(self.mlp[2].weight, std=0.02)
        nn.init.zeros_(self.mlp[2].bias)
        self.last_attention = None
        self.aux_loss = torch.zeros(())
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        h = self.embed(tokens)
        attention = (h @ self.query / D**0.5).softmax(-1)
        self.last_attention = attention.detach()
        self.aux_loss = 1e-3 * (attention * attention.clamp(min=1e-9).log()).sum(-1).mean()
        return self.mlp((attention.unsqueeze(-1) * h).sum(1))


def get_batch():
    y = torch.randint(0, CLASSES, (B,))
    tokens = torch.randint(CLASSES, V, (B, T))
    tokens[torch.arange(B), torch.randint(0, T, (B,))] = y
    return tokens, y


STEPS = 80
model = PoolingEncoder()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(STEPS):
    tokens, y = get_batch()
    loss = F.cross_entropy(model(tokens), y) + model.aux_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item(), model.last_attention.max().item(), model.calls)
torch.save(model.state_dict(), io.BytesIO())
