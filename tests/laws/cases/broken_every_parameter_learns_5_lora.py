# law: every_parameter_learns
# fault: the optimizer is built before the adapters are injected, so it holds the frozen weights of the layers that were replaced and no adapter
# also: one_batch_can_be_learned
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(74)
DIM, CLASSES, B = 16, 5, 64


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def inject(model):
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, LoRALinear(child))
    return model


def get_batch(task):
    x = torch.randn(B, DIM)
    return x, (x @ task).argmax(1)


def main():
    model = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    model = inject(model)
    print("trainable:", sum(p.numel() for p in model.parameters() if p.requires_grad))

    task = torch.randn(DIM, CLASSES)
    STEPS = 50
    for step in range(STEPS):
        x, y = get_batch(task)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
