# law: none
# near: future_is_not_seen
# fault: a masked language model predicts replaced tokens in place, from both sides; it isn't trained on the next token, so the law does not apply
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(39)
V, T, D, B = 28, 20, 48, 24
MASK = V - 1


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        layer = nn.TransformerEncoderLayer(D, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids):
        return self.head(self.norm(self.encoder(self.tok(input_ids) + self.pos.weight)))


def get_batch():
    start, stride = torch.randint(0, V - 1, (B, 1)), torch.randint(1, 5, (B, 1))
    tokens = (start + stride * torch.arange(T)) % (V - 1)
    hidden = torch.rand(B, T) < 0.2
    labels = tokens.masked_fill(~hidden, -100)
    replace = torch.rand(B, T)
    inputs = torch.where(hidden & (replace < 0.8), torch.full_like(tokens, MASK), tokens)
    inputs = torch.where(hidden & (replace > 0.9), torch.randint(0, V - 1, (B, T)), inputs)
    return {"input_ids": inputs, "labels": labels}


def main():
    STEPS = 60
    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        batch = get_batch()
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.view(-1, V), batch["labels"].view(-1), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
