# law: checkpoint_is_complete
# fault: the learned initial state is a tensor with requires_grad that is added to the optimizer by hand; it is trained, but being no nn.Parameter it is missing in state_dict
# also:
import io

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(154)
T, FEATURES, HIDDEN, B = 6, 3, 32, 48


class StateModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN, batch_first=True)
        self.h0 = torch.zeros(1, 1, HIDDEN, requires_grad=True)
        self.c0 = torch.zeros(1, 1, HIDDEN, requires_grad=True)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        state = (self.h0.expand(1, len(x), -1).contiguous(), self.c0.expand(1, len(x), -1).contiguous())
        return self.out(self.lstm(x, state)[0]).squeeze(-1)


def get_batch():
    x = torch.randn(B, T, FEATURES)
    position = torch.full((B, T), 2.0)
    for t in range(1, T):
        position[:, t] = 0.7 * position[:, t - 1] + 0.4 * x[:, t, 0]
    return x, (position - 0.9) / 0.8


STEPS = 60
model = StateModel()
optimizer = torch.optim.Adam([*model.parameters(), model.h0, model.c0], lr=1e-2)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item())
buffer = io.BytesIO()
torch.save({"weights": model.state_dict(), "step": STEPS}, buffer)
print("saved", buffer.tell(), "bytes")
