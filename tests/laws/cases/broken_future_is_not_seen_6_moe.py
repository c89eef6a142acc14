# law: future_is_not_seen
# fault: expert-choice routing lets each expert pick its top tokens over the whole sequence, so whether a token is processed depends on later tokens; named as a limit for decoders in the paper on expert choice
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(35)
V, T, D, H, B, E = 29, 24, 32, 4, 12, 4


class ExpertChoice(nn.Module):
    def __init__(self, capacity=1.0):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D)) for _ in range(E))
        self.k = int(capacity * T / E)

    def forward(self, x):
        score = self.gate(x).softmax(-1)  # (batch, time, experts)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            weight, index = score[:, :, e].topk(self.k, dim=1)
            index = index.unsqueeze(-1).expand(-1, -1, D)
            out = out.scatter_add(1, index, weight.unsqueeze(-1) * expert(x.gather(1, index)))
        return out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.moe = ExpertChoice()

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, D))
        return x + self.moe(self.ln2(x))


class MoELM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx):
        x = self.tok(idx) + self.pos.weight
        return self.head(self.norm(self.blocks(x)))


def get_batch():
    start, stride = torch.randint(0, V, (B, 1)), torch.randint(1, 5, (B, 1))
    seq = (start + stride * torch.arange(T + 1)) % V
    return seq[:, :-1], seq[:, 1:]


STEPS = 30
model = MoELM()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(STEPS):
    x, y = get_batch()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
