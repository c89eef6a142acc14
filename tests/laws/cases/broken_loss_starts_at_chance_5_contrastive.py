# law: loss_starts_at_chance
# fault: the embeddings are not normalised before the division by a temperature of 0.07, so the logits of the first step are far apart and the loss starts far above ln(batch)
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(114)
DIM, B = 20, 48


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64))

    def forward(self, x):
        return self.encoder(x)


prototypes = torch.randn(300, DIM)


def get_batch():
    base = prototypes[torch.randperm(300)[:B]]
    return base + 1.5 * torch.randn(B, DIM), base + 1.5 * torch.randn(B, DIM)


STEPS = 50
model = Projector()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    a, b = get_batch()
    logits = model(a) @ model(b).T / 0.07
    loss = F.cross_entropy(logits, torch.arange(B))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, round(loss.item(), 4))
