# law: none
# near: precision_is_enough
# fault: a physics-informed network trains in float64 by set_default_dtype, so the script is more precise than the float32 pass; second derivatives come from autograd in the loss
# also:
import torch
from torch import nn

torch.manual_seed(179)
torch.set_default_dtype(torch.float64)
PI = 3.141592653589793

# -u'' = pi^2 sin(pi x) on [0, 1], u(0) = u(1) = 0
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)


def solution(x):
    return x * (1 - x) * net(x)  # the boundary values hold by construction


def residual(x):
    x = x.requires_grad_()
    u = solution(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
    return ddu + PI**2 * torch.sin(PI * x)


def main():
    for step in range(150):
        points = torch.rand(64, 1)
        loss = residual(points).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step} residual {loss.item():.5f}")


if __name__ == "__main__":
    main()
