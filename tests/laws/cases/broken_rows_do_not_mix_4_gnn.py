# law: rows_do_not_mix
# fault: the edges of the graphs are concatenated without adding the offset of the nodes before them, so every edge points into the first graph
# also: order_does_not_matter, halves_make_a_whole, loss_starts_at_chance
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(23)
DIM, GRAPHS = 8, 16


def random_graph():
    n = int(torch.randint(5, 10, ()))
    x = torch.randn(n, DIM)
    edges = torch.randint(0, n, (2, 3 * n))
    y = (x[edges[0], 0] * x[edges[1], 1]).mean() + x[:, 2].mean()
    return x, edges, y


def collate(graphs):
    x = torch.cat([g[0] for g in graphs])
    edges = torch.cat([g[1] for g in graphs], dim=1)
    graph = torch.cat([torch.full((len(g[0]),), i) for i, g in enumerate(graphs)])
    y = torch.stack([g[2] for g in graphs])
    return x, edges, graph, y


class GraphNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.inp = nn.Linear(DIM, width)
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, x, edges, graph, count):
        h = F.relu(self.inp(x))
        source, target = edges
        for message, update in zip(self.message, self.update):
            m = F.relu(message(torch.cat([h[source], h[target]], 1)))
            total = torch.zeros_like(h).index_add(0, target, m)
            h = h + F.relu(update(torch.cat([h, total], 1)))
        size = torch.bincount(graph, minlength=count).unsqueeze(1)
        pooled = torch.zeros(count, h.size(1)).index_add(0, graph, h) / size
        return self.out(pooled).squeeze(1)


dataset = [random_graph() for _ in range(400)]
target = torch.stack([g[2] for g in dataset])
dataset = [(x, e, (y - target.mean()) / target.std()) for x, e, y in dataset]
loader = torch.utils.data.DataLoader(dataset, batch_size=GRAPHS, shuffle=True, collate_fn=collate)
model = GraphNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(2):
    for x, edges, graph, y in loader:
        loss = F.mse_loss(model(x, edges, graph, len(y)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
