# law: none
# near: every_parameter_learns
# fault: a deep ensemble of five members as stacked tensors with torch.func; the parameters that learn are in a dictionary, and the module that gives the shape of the computation keeps its own, unused ones
# also:
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

torch.manual_seed(210)
MEMBERS, B = 5, 64


def make():
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


params, buffers = stack_module_state([make() for _ in range(MEMBERS)])
skeleton = copy.deepcopy(make()).to("meta")


def member(p, b, x):
    return functional_call(skeleton, (p, b), (x,)).squeeze(-1)


def get_batch():
    x = torch.randn(B, 6)
    return x, (torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]) / 1.2


optimizer = torch.optim.Adam(params.values(), lr=4e-3)
STEPS = 60
for step in range(STEPS):
    x, y = get_batch()
    prediction = vmap(member, in_dims=(0, 0, None))(params, buffers, x)
    loss = F.mse_loss(prediction, y.expand(MEMBERS, B))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item(), "spread", prediction.std(0).mean().item())
