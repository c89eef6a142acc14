# law: order_does_not_matter
# fault: the positional encoding of the PyTorch tutorial (pe[:x.size(0)], made for time first) is used with batch_first=True, so the code of a position is added by row of the batch
# also: halves_make_a_whole
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(100)
V, T, D, B = 24, 12, 32, 32


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=500):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[: x.size(0)]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.pos = PositionalEncoding(D)
        layer = nn.TransformerEncoderLayer(D, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = nn.Linear(D, 4)

    def forward(self, src):
        x = self.pos(self.embed(src) * math.sqrt(D))
        return self.decoder(self.encoder(x))


def get_batch():
    tokens = torch.randint(0, V, (B, T))
    tags = (tokens + torch.arange(T)) % 4
    return tokens, tags


STEPS = 60
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(STEPS):
    tokens, tags = get_batch()
    loss = F.cross_entropy(model(tokens).reshape(-1, 4), tags.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item())
