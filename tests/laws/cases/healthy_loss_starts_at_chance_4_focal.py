# law: none
# near: loss_starts_at_chance
# fault: RetinaNet sets the bias of the class layer so that the rare foreground starts at probability 0.01, far from one half, and uses the focal loss
# also:
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(118)
CLASSES, FEATURES, CELLS, B = 3, 16, 30, 16


class RetinaHead(nn.Module):
    def __init__(self, prior=0.01):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv1d(FEATURES, 64, 3, padding=1), nn.ReLU(), nn.Conv1d(64, 64, 3, padding=1), nn.ReLU()
        )
        self.cls = nn.Conv1d(64, CLASSES, 3, padding=1)
        nn.init.normal_(self.cls.weight, std=0.01)
        nn.init.constant_(self.cls.bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        return self.cls(self.tower(x))


def focal_loss(logits, target, alpha=0.25, gamma=2.0):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    pt = p * target + (1 - p) * (1 - target)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * (1 - pt) ** gamma * ce).sum() / target.sum().clamp(min=1)


pattern = 2 * torch.randn(CLASSES, FEATURES)


def get_batch():
    target = (torch.rand(B, CLASSES, CELLS) < 0.02).float()
    x = torch.einsum("bkl,kf->bfl", target, pattern) + 0.5 * torch.randn(B, FEATURES, CELLS)
    return x, target


def main():
    STEPS = 60
    model = RetinaHead()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        x, target = get_batch()
        loss = focal_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            print(step, round(loss.item(), 4))


if __name__ == "__main__":
    main()
