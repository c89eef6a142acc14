# law: none
# near: same_pass_same_bits
# fault: truncated backpropagation carries the state from window to window on purpose, as a variable of the loop that is an argument and a result of the model
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(11)
V, B, T = 24, 16, 16


class CharLSTM(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.embed = nn.Embedding(V, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.head = nn.Linear(hidden, V)

    def forward(self, tokens, state=None):
        out, state = self.lstm(self.embed(tokens), state)
        return self.head(out), state


# one long stream per row: a repeated motif of the row, with a few random replacements
length = 20 * T + 1
motif = torch.randint(0, V, (B, 7))
stream = motif.repeat(1, length // 7 + 1)[:, :length]
flip = torch.rand(stream.shape) < 0.02
stream = torch.where(flip, torch.randint(0, V, stream.shape), stream)

model = CharLSTM()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for epoch in range(2):
    state = None
    for start in range(0, length - 1, T):
        x = stream[:, start : start + T]
        y = stream[:, start + 1 : start + T + 1]
        if state is not None:
            state = tuple(s.detach() for s in state)
        logits, state = model(x, state)
        loss = F.cross_entropy(logits.reshape(-1, V), y.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"epoch {epoch} last window {loss.item():.3f}")
