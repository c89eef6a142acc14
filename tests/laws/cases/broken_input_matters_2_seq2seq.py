# law: input_matters
# fault: the decoder of a translation model gets the target itself, not shifted by one, so it copies its answer and the source is never needed
# also: future_is_not_seen
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(61)
V, S, D, B = 22, 10, 64, 32


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(V, D), nn.Embedding(V, D)
        self.encoder = nn.GRU(D, D, batch_first=True)
        self.decoder = nn.GRU(D, D, batch_first=True)
        self.out = nn.Linear(D, V)

    def forward(self, src, tgt):
        _, state = self.encoder(self.source(src))
        h, _ = self.decoder(self.target(tgt), state)
        return self.out(h)


cipher = torch.randperm(V)


def get_batch():
    src = torch.randint(0, V, (B, S))
    return src, cipher[src]


STEPS = 60
model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(STEPS):
    src, tgt = get_batch()
    logits = model(src, tgt)
    loss = F.cross_entropy(logits.transpose(1, 2), tgt)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item())
