# law: none
# near: halves_make_a_whole
# fault: as in detectors, the box loss is summed and divided by the number of objects in the batch and the class loss by the number of anchors; the two parts have different weights
# also:
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(91)
CELLS, FEATURES, CLASSES, B = 16, 12, 3, 24


class Detector(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv1d(FEATURES, width, 3, padding=1), nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU()
        )
        self.box, self.kind = nn.Conv1d(width, 2, 1), nn.Conv1d(width, CLASSES + 1, 1)
        nn.init.normal_(self.kind.weight, std=0.02)
        nn.init.zeros_(self.kind.bias)

    def forward(self, x):
        h = self.trunk(x)
        return {"boxes": self.box(h), "classes": self.kind(h)}


pattern = torch.randn(CLASSES, FEATURES)


def get_batch():
    present = torch.rand(B, CELLS) < 0.25
    present[:, 0] = True  # at least one object per image
    kind = torch.randint(0, CLASSES, (B, CELLS))
    box = torch.randn(B, 2, CELLS)
    x = 0.3 * torch.randn(B, FEATURES, CELLS)
    x = x + (pattern[kind] * present.unsqueeze(-1)).transpose(1, 2)
    x[:, :2] += box
    return x, {"present": present, "classes": torch.where(present, kind + 1, 0), "boxes": box}


def criterion(out, target):
    class_loss = F.cross_entropy(out["classes"], target["classes"])
    positives = target["present"].sum()
    distance = F.mse_loss(out["boxes"], target["boxes"], reduction="none").mean(1)
    box_loss = (distance * target["present"]).sum() / positives
    return {"class": class_loss, "box": box_loss}


def main():
    STEPS = 60
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        x, target = get_batch()
        losses = criterion(model(x), target)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, {k: round(v.item(), 3) for k, v in losses.items()})


if __name__ == "__main__":
    main()
