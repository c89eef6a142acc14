# law: ranks_agree
# fault: the seed depends on the rank before the model is built, and with hand-made averaging of gradients the weights are not broadcast; each rank trains its own network with a mixed gradient
# also:
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(194 + rank)  # other data on each rank

V, T, D, CLASSES, B = 30, 10, 32, 4, 32


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        layer = nn.TransformerEncoderLayer(D, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def get_batch():
    y = torch.randint(0, CLASSES, (B,))
    tokens = torch.randint(0, V, (B, T))
    own = torch.rand(B, T) < 0.5
    return torch.where(own, y[:, None] * 7 + torch.randint(0, 7, (B, T)), tokens), y


model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(40):
    tokens, y = get_batch()
    loss = F.cross_entropy(model(tokens), y)
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
    if rank == 0 and step % 10 == 0:
        print(step, loss.item(), flush=True)
dist.destroy_process_group()
