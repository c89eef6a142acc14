# law: none
# near: order_does_not_matter
# fault: the labels of a contrastive loss are arange(batch), places in the batch, but both views are permuted together and the loss stays the same
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(105)
DIM, B = 16, 32
encoder = nn.Sequential(nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, 32))
optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-3)
clusters = torch.randn(200, DIM)


def get_batch():
    base = clusters[torch.randperm(len(clusters))[:B]]
    return base + 0.2 * torch.randn(B, DIM), base + 0.2 * torch.randn(B, DIM)


def info_nce(a, b, temperature=0.3):
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    logits = a @ b.T / temperature
    labels = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels))


def main():
    STEPS = 60
    for step in range(STEPS):
        view1, view2 = get_batch()
        loss = info_nce(encoder(view1), encoder(view2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
