# law: none
# near: future_is_not_seen
# fault: a prefix language model sees its prefix in both directions; the logits that are trained are those of the suffix, and they see no later token
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(36)
V, T, P, D, H, B = 25, 24, 8, 48, 4, 16

allowed = torch.ones(T, T, dtype=torch.bool).tril()
allowed[:P, :P] = True


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:t, :t])
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.ln2(x))


class PrefixLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        return self.head(self.norm(self.blocks(x)))


def get_batch():
    prefix = torch.randint(0, V, (B, P))
    answer = prefix.sort(1).values.repeat(1, 3)[:, : T + 1 - P]  # the sorted prefix, repeated
    seq = torch.cat([prefix, answer], 1)
    target = seq[:, 1:].clone()
    target[:, : P - 1] = -100  # the prefix is not predicted
    return seq[:, :-1], target


def main():
    STEPS = 50
    model = PrefixLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        x, y = get_batch()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, round(loss.item(), 4))


if __name__ == "__main__":
    main()
