# law: none
# near: loss_starts_at_chance
# fault: the loss is a sum over three tasks with learned uncertainty weights, so chance is a sum too: ln 6 + ln 2 and the variance of the third target
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(119)
DIM, B = 18, 48


class MultiTask(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(DIM, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.kind, self.flag, self.size = nn.Linear(width, 6), nn.Linear(width, 1), nn.Linear(width, 1)
        self.log_var = nn.Parameter(torch.zeros(3))
        for head in (self.kind, self.flag, self.size):
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)

    def forward(self, x):
        h = self.trunk(x)
        return self.kind(h), self.flag(h).squeeze(1), self.size(h).squeeze(1)


w_kind, w_flag, w_size = torch.randn(DIM, 6), torch.randn(DIM), torch.randn(DIM) / DIM**0.5


def get_batch():
    x = torch.randn(B, DIM)
    return x, ((x @ w_kind).argmax(1), (x @ w_flag > 0).float(), x @ w_size)


STEPS = 60
model = MultiTask()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(STEPS):
    x, (kind, flag, size) = get_batch()
    out = model(x)
    losses = torch.stack(
        [
            F.cross_entropy(out[0], kind),
            F.binary_cross_entropy_with_logits(out[1], flag),
            F.mse_loss(out[2], size),
        ]
    )
    loss = (torch.exp(-model.log_var) * losses + 0.5 * model.log_var).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item(), losses.detach().tolist())
