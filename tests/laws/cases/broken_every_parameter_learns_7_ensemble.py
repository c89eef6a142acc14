# law: every_parameter_learns
# fault: a deep ensemble builds one optimizer per member in a loop, but the training loop steps the last one only, the variable left over from that loop
# also: one_batch_can_be_learned
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(212)
DIM, CLASSES, B, MEMBERS = 12, 4, 64, 4


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 48), nn.ReLU(), nn.Linear(48, CLASSES)) for _ in range(MEMBERS)
        )

    def forward(self, x):
        return tuple(member(x) for member in self.members)


task = torch.randn(DIM, CLASSES)


def get_batch():
    x = torch.randn(B, DIM)
    return x, (x @ task).argmax(1)


model = Ensemble()
optimizers = []
for member in model.members:
    optimizer = torch.optim.Adam(member.parameters(), lr=3e-3)
    optimizers.append(optimizer)

STEPS = 60
for step in range(STEPS):
    x, y = get_batch()
    losses = [F.cross_entropy(logits, y) for logits in model(x)]
    loss = sum(losses) / MEMBERS
    model.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, [round(value.item(), 3) for value in losses])
