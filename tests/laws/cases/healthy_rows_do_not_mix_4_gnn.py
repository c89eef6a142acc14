# law: none
# near: rows_do_not_mix
# fault: nodes of a batch of graphs are concatenated and exchange messages; the rows of this batch are graphs, and nothing passes between graphs
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(28)
DIM = 6


def random_graph():
    n = int(torch.randint(4, 9, ()))
    x = torch.randn(n, DIM)
    pairs = torch.randint(0, n, (2, 2 * n))
    edges = torch.cat([pairs, pairs.flip(0)], 1)
    y = int((x[edges[0], 0] * x[edges[1], 0]).mean() > 0)
    return x, edges, y


def collate(graphs):
    xs, es, owner, offset = [], [], [], 0
    for i, (x, e, _) in enumerate(graphs):
        xs.append(x)
        es.append(e + offset)
        owner.append(torch.full((len(x),), i))
        offset += len(x)
    return {
        "x": torch.cat(xs),
        "edge_index": torch.cat(es, 1),
        "batch": torch.cat(owner),
        "y": torch.tensor([g[2] for g in graphs]),
    }


class GIN(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Linear(DIM, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(2)
        )
        self.eps = nn.Parameter(torch.zeros(2))
        self.readout = nn.Linear(width, 2)

    def forward(self, data):
        h = self.embed(data["x"])
        source, target = data["edge_index"]
        for i, layer in enumerate(self.layers):
            neighbours = torch.zeros_like(h).index_add(0, target, h[source])
            h = h + F.relu(layer((1 + self.eps[i]) * h + neighbours)) / 4
        count = int(data["batch"].max()) + 1
        total = torch.zeros(count, h.size(1)).index_add(0, data["batch"], h)
        return self.readout(total / torch.bincount(data["batch"]).unsqueeze(1))


def main():
    graphs = [random_graph() for _ in range(480)]
    loader = torch.utils.data.DataLoader(graphs, batch_size=24, shuffle=True, collate_fn=collate)
    model = GIN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for data in loader:
            loss = F.cross_entropy(model(data), data["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
