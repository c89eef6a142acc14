# law: none
# near: one_batch_can_be_learned
# fault: LBFGS with a closure evaluates the loss several times in one step; the whole data set is the batch
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(131)
x = torch.linspace(-3, 3, 80).unsqueeze(1)
y = torch.sin(2 * x) + 0.3 * x
y = (y - y.mean()) / y.std()
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=10, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss


for step in range(30):
    loss = optimizer.step(closure)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.6f}")

with torch.no_grad():
    worst = (model(x) - y).abs().max().item()
print(f"largest error {worst:.4f}")
