# law: none
# near: order_does_not_matter
# fault: a pairwise ranking loss over all pairs of the batch: rows meet in the loss, yet every order has all pairs
# also: halves_make_a_whole
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(109)
DIM, B = 12, 48
scorer = nn.Sequential(nn.Linear(DIM, 96), nn.Tanh(), nn.Linear(96, 1))
optimizer = torch.optim.Adam(scorer.parameters(), lr=3e-3)
taste = torch.randn(DIM)


def get_batch():
    x = torch.randn(B, DIM)
    relevance = x @ taste + 0.5 * x[:, 0] * x[:, 1]
    return x, relevance


def ranknet(score, relevance):
    better = (relevance[:, None] > relevance[None, :]).float()
    difference = score[:, None] - score[None, :]
    return (better * F.softplus(-difference)).sum() / better.sum()


STEPS = 50
for step in range(STEPS):
    x, relevance = get_batch()
    loss = ranknet(scorer(x).squeeze(1), relevance)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, round(loss.item(), 4))
