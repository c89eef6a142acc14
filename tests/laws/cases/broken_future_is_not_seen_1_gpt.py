# law: future_is_not_seen
# fault: is_causal was left out of scaled_dot_product_attention, so a model trained on the next token reads it
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(30)
V, T, D, H, B = 37, 24, 48, 4, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(Block(), Block())
        self.ln_f, self.lm_head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, V), targets.reshape(-1))
        return logits, loss


# text of words drawn from a small dictionary
words = [torch.randint(1, V, (int(n),)) for n in torch.randint(2, 6, (40,))]
text = torch.cat([torch.cat([words[i], torch.zeros(1, dtype=torch.long)]) for i in torch.randint(0, 40, (3000,))])


def get_batch():
    ix = torch.randint(len(text) - T - 1, (B,))
    x = torch.stack([text[i : i + T] for i in ix])
    y = torch.stack([text[i + 1 : i + 1 + T] for i in ix])
    return x, y


def main():
    STEPS = 50
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        x, y = get_batch()
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
