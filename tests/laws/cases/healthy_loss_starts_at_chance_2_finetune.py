# law: none
# near: loss_starts_at_chance
# fault: the script fine-tunes a model that it trained before, so the loss starts far below chance; starting better than chance is the purpose
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(116)
DIM, CLASSES, B = 12, 5, 64
task = torch.randn(DIM, CLASSES)


def pretrained():
    """Solve the first task in closed form and put the solution into a network, as a loaded checkpoint would."""
    net = nn.Sequential(nn.Linear(DIM, 128), nn.Tanh(), nn.Linear(128, CLASSES))
    x = torch.randn(4000, DIM)
    with torch.no_grad():
        h = net[1](net[0](x))
        h1 = torch.cat([h, torch.ones(len(h), 1)], 1)
        logits = 1.5 * (x @ task)
        solution = torch.linalg.lstsq(h1, logits).solution
        net[2].weight.copy_(solution[:-1].T)
        net[2].bias.copy_(solution[-1])
    return net


def get_batch():
    x = torch.randn(B, DIM)
    return x, (x @ (task + 0.3 * shift)).argmax(1)


shift = torch.randn(DIM, CLASSES)
model = pretrained()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
STEPS = 60
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item())
