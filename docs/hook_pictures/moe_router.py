"""Load of the eight experts of a layer in 300 steps of a small mixture of experts with AdamW, each token routed to two
of them; 1 is the fair share, 4 all tokens. Without a balance loss (left) two experts take nearly all tokens, and five
get hardly any. With one of 0.02 (right) the router collapses in the first steps, too, but all experts get tokens again.
The numbers above are those of the last measurement."""

from tempfile import TemporaryDirectory

import loopscope
import pandas as pd
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from docs.hook_pictures._small_gpt import batches

WIDTH, EXPERTS, TOP_K, STEPS = 64, 8, 2, 300
ROUTER = "experts_layer.router"
SHOWN = ("max_violation", "load_entropy", "dead_experts")


class Experts(nn.Module):
    """A mixture of experts with the balance loss E·Σ f·P of its last pass."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        self.top_k, self.balance = TOP_K, torch.zeros(())

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.router(hidden).softmax(-1)
        weights, chosen = scores.topk(TOP_K)
        share = functional.one_hot(chosen, EXPERTS).float().mean((0, 1, 2))
        self.balance = EXPERTS * (share * scores.mean((0, 1))).sum()
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=-2)
        picked = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, WIDTH))
        return (weights[..., None] * picked).sum(-2)


class Mixture(nn.Module):
    """A recurrent layer and a mixture of experts over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixer = nn.Embedding(256, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.experts_layer, self.head = Experts(), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.mixer(self.tokens(tokens))[0]
        return self.head(hidden + self.experts_layer(hidden))


def trained(weight: float) -> pd.DataFrame:
    """Train with a weight of the balance loss, and return the hook's metrics by step."""
    torch.manual_seed(0)
    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = {"moe_router": {"interval": 5, "names": "*"}}
    with TemporaryDirectory() as folder:
        settings = {"hook_options": options, "out": f"{folder}/run", "display": "none"}
        with loopscope.attach(model, optimizer, hooks=["moe_router"], **settings) as scope:
            for inputs, targets in scope.batches(batches(STEPS)):
                loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                scope.backward(loss + weight * model.experts_layer.balance)
                optimizer.step()
                optimizer.zero_grad()
        return loopscope.read_run(f"{folder}/run").frame()


def draw() -> Figure:
    """Train and plot."""
    figure, panels = pyplot.subplots(1, 2, sharey=True)
    for axes, weight in zip(panels, (0.0, 0.02), strict=True):
        frame = trained(weight)
        for expert in range(EXPERTS):
            axes.plot(frame[f"moe_router/load/{ROUTER}/{expert}"].dropna(), linewidth=1, label=f"load/{expert}")
        last = {name: frame[f"moe_router/{name}"].dropna().iloc[-1] for name in SHOWN}
        axes.set_title(", ".join(f"{name} {value:.2g}" for name, value in last.items()), fontsize=8)
        axes.set_xlabel("step")
    panels[0].legend(fontsize=7, ncols=2)
    return figure
