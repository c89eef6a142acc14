# law: halves_make_a_whole
# fault: with ragged rows, accumulation averages the mean per micro-batch instead of dividing by the tokens of the whole batch; the gradient accumulation bug fixed in transformers in October 2024
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(82)
V, T, D, H, B, ACCUM = 28, 24, 48, 4, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.block = Block()
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, input_ids, labels):
        logits = self.head(self.norm(self.block(self.tok(input_ids) + self.pos.weight)))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def get_batch():
    start, stride = torch.randint(0, V - 1, (B, 1)), torch.randint(1, 5, (B, 1))
    seq = (start + stride * torch.arange(T)) % (V - 1) + 1
    longest = int(torch.randint(4, T + 1, ()))
    length = torch.randint(3, longest + 1, (B, 1))
    keep = torch.arange(T) < length
    return {"input_ids": seq * keep, "labels": seq.masked_fill(~keep, -100)}


def main():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    STEPS = 20
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(ACCUM):
            loss = model(**get_batch())["loss"] / ACCUM
            loss.backward()
            total += loss.item()
        optimizer.step()
        if step % 5 == 0:
            print(step, total)


if __name__ == "__main__":
    main()
