# law: none
# near: one_batch_can_be_learned
# fault: with a temperature of 1 the loss of cosine similarities is bounded from below (about 2.4 of ln 32 = 3.5), even if all pairs are separated
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(128)
DIM, B = 24, 32
encoder = nn.Sequential(nn.Linear(DIM, 96), nn.ReLU(), nn.Linear(96, 32))
optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
objects = torch.randn(500, DIM)


def get_batch():
    base = objects[torch.randperm(500)[:B]]
    keep1, keep2 = torch.rand(2, B, DIM) > 0.1
    return base * keep1, base * keep2


STEPS = 60
for step in range(STEPS):
    a, b = (F.normalize(encoder(view), dim=1) for view in get_batch())
    similarity = a @ b.T
    loss = F.cross_entropy(similarity, torch.arange(B))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item(), (similarity.argmax(1) == torch.arange(B)).float().mean().item())
