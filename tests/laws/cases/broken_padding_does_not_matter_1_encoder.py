# law: padding_does_not_matter
# fault: attention is masked but the mean pooling counts the padded positions, as in early sentence-embedding recipes
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(50)
V, D, T, B, PAD, CLASSES = 32, 40, 16, 32, 0, 4


class SentenceEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.position = nn.Embedding(T, D)
        layer = nn.TransformerEncoderLayer(D, 4, 80, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.size(1)))
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        return self.head(x.mean(dim=1))


topic = torch.randint(0, CLASSES, (V,))


def get_batch():
    tokens = torch.randint(1, V, (B, T))
    length = torch.randint(4, T + 1, (B,))
    mask = (torch.arange(T) < length[:, None]).long()
    votes = (F.one_hot(topic[tokens], CLASSES) * mask.unsqueeze(-1)).sum(1)
    return {"input_ids": tokens.masked_fill(mask == 0, PAD), "attention_mask": mask, "labels": votes.argmax(1)}


STEPS = 60
model = SentenceEncoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(STEPS):
    batch = get_batch()
    labels = batch.pop("labels")
    loss = F.cross_entropy(model(**batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
