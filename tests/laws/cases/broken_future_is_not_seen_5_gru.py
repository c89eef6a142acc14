# law: future_is_not_seen
# fault: bidirectional=True in a language model, taken over from a tagger; the backward direction reads the next token
# also:
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(34)
V, T, B = 30, 20, 24


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class RNNLM(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(V, 32)
        self.rnn = nn.GRU(32, hidden, batch_first=True, bidirectional=True)
        self.decoder = nn.Linear(2 * hidden, V)

    def forward(self, input_ids, labels=None):
        h, _ = self.rnn(self.embed(input_ids))
        logits = self.decoder(h)
        loss = None
        if labels is not None:  # labels are the inputs; the shift happens here
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
        return Output(logits, loss)


successor = torch.randint(0, V, (V, 3))


def get_batch():
    seq = torch.randint(0, V, (B, 1))
    for _ in range(T - 1):
        pick = torch.randint(0, 3, (B,))
        seq = torch.cat([seq, successor[seq[:, -1], pick][:, None]], 1)
    return {"input_ids": seq, "labels": seq}


STEPS = 60
model = RNNLM()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(STEPS):
    out = model(**get_batch())
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, out.loss.item())
