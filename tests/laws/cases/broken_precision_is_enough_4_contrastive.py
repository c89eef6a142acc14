# law: precision_is_enough
# fault: the softmax of the contrastive loss is written as exp(logits).sum() under float16 autocast; a similarity of 1 over a temperature of 0.07 is 14, and exp of it exceeds 65504
# also: one_batch_can_be_learned, loss_starts_at_chance, every_parameter_learns, input_matters, order_does_not_matter, halves_make_a_whole
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(173)
DIM, B, TEMPERATURE = 32, 48, 0.07


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, x):
        z = self.net(x)
        return z / z.norm(dim=1, keepdim=True)


def nt_xent(a, b):
    z = torch.cat([a, b])
    similarity = z @ z.T / TEMPERATURE
    weight = torch.exp(similarity)
    weight = weight - torch.diag(weight.diag())
    positive = torch.exp((a * b).sum(1) / TEMPERATURE).repeat(2)
    return -torch.log(positive / weight.sum(1)).mean()


objects = torch.randn(400, DIM)


def get_batch():
    base = objects[torch.randperm(400)[:B]]
    return base + 0.1 * torch.randn(B, DIM), base + 0.1 * torch.randn(B, DIM)


STEPS = 40
model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    a, b = get_batch()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nt_xent(model(a), model(b))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
