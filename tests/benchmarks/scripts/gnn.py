"""A graph network with two rounds of messages on batches of small random graphs."""

import torch
from torch import nn

torch.manual_seed(0)
NODES, WIDTH = 20, 64


class GraphNetwork(nn.Module):
    """Predicts a number for each graph from its nodes and edges."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.messages = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, nodes, edges, graphs, count):
        x = self.enter(nodes)
        for layer in self.messages:
            x = x + torch.relu(layer(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])))
        return self.leave(torch.zeros(count, WIDTH).index_add(0, graphs, x) / NODES).squeeze(1)


model = GraphNetwork()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(2_000):
    nodes = torch.randn(32 * NODES, 8)
    edges = torch.randint(NODES, (2, 32, 60)) + NODES * torch.arange(32)[:, None]
    graphs = torch.arange(32).repeat_interleave(NODES)
    loss = (model(nodes, edges.flatten(1), graphs, 32) - nodes.view(32, -1).std(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
