# law: order_does_not_matter
# fault: the owner of each node is computed as arange // average size, as if all graphs had the same number of nodes; with ragged graphs the pooling takes nodes of the neighbouring graphs
# also: rows_do_not_mix, halves_make_a_whole
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(103)
DIM, WIDTH = 5, 48


def random_graph():
    n = int(torch.randint(4, 11, ()))
    x = torch.randn(n, DIM) + torch.randn(DIM)
    edges = torch.randint(0, n, (2, 2 * n))
    return x, edges, x[:, 0].mean() + x[:, 1].mean() * x[:, 2].mean()


def collate(graphs):
    offset, edges = 0, []
    for x, e, _ in graphs:
        edges.append(e + offset)
        offset += len(x)
    return torch.cat([g[0] for g in graphs]), torch.cat(edges, 1), torch.stack([g[2] for g in graphs])


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(DIM, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def propagate(self, h, edges):
        degree = torch.bincount(edges[1], minlength=len(h)).clamp(min=1).unsqueeze(1)
        return h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]) / degree

    def forward(self, x, edges, count):
        h = F.relu(self.propagate(self.lin1(x), edges))
        h = F.relu(self.propagate(self.lin2(h), edges))
        size = -(-len(x) // count)
        owner = torch.arange(len(x)) // size
        pooled = torch.zeros(count, WIDTH).index_add(0, owner, h) / size
        return self.out(pooled).squeeze(1)


graphs = [random_graph() for _ in range(480)]
y = torch.stack([g[2] for g in graphs])
graphs = [(x, e, (t - y.mean()) / y.std()) for x, e, t in graphs]
loader = torch.utils.data.DataLoader(graphs, batch_size=24, shuffle=True, collate_fn=collate)
model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(2):
    for x, edges, target in loader:
        loss = F.mse_loss(model(x, edges, len(target)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
