# law: none
# near: future_is_not_seen
# fault: the decoder of a translation model attends to the whole source, also to source positions after t; only the target tokens after t are its future
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(37)
V, S, D, B = 24, 10, 48, 24
BOS = 0


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.position = nn.Embedding(S + 1, D)
        enc = nn.TransformerEncoderLayer(D, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        dec = nn.TransformerDecoderLayer(D, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(enc, 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(dec, 1)
        self.norm, self.generator = nn.LayerNorm(D), nn.Linear(D, V)
        nn.init.normal_(self.generator.weight, std=0.02)
        nn.init.zeros_(self.generator.bias)

    def forward(self, src, tgt):
        where = self.position.weight
        memory = self.encoder(self.embed(src) + where[: src.size(1)])
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1))
        h = self.decoder(self.embed(tgt) + where[: tgt.size(1)], memory, tgt_mask=mask, tgt_is_causal=True)
        return self.generator(self.norm(h))


cipher = torch.randperm(V - 1) + 1


def get_batch():
    src = torch.randint(1, V, (B, S))
    tgt = cipher[src.flip(1) - 1]  # reversed and enciphered
    tgt_in = torch.cat([torch.full((B, 1), BOS), tgt[:, :-1]], 1)
    return src, tgt_in, tgt


STEPS = 60
model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(STEPS):
    src, tgt_in, tgt_out = get_batch()
    logits = model(src, tgt_in)
    loss = F.cross_entropy(logits.reshape(-1, V), tgt_out.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}")
