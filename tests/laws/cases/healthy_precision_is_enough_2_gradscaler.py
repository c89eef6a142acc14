# law: none
# near: precision_is_enough
# fault: float16 autocast with a GradScaler: the gradients are 2^10 times larger until unscale_, and the scaled loss is not the loss
# also:
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(177)
centers = 1.5 * torch.randn(6, 20)
y = torch.randint(0, 6, (1280,))
x = centers[y] + torch.randn(1280, 20)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(20, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 6))
nn.init.normal_(model[4].weight, std=0.02)
nn.init.zeros_(model[4].bias)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(xb).float(), yb)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    print("epoch", epoch, "loss", loss.item(), "scale", scaler.get_scale())
