# law: none
# near: input_matters
# fault: classifier-free guidance drops the condition of one row in five, and the output layer starts at zero: the condition decides little at first, and the loss of the first step is the variance of the noise for every input
# also:
import torch
from torch import nn

torch.manual_seed(213)
TIMES, CLASSES, DIM, B = 50, 4, 2, 128
alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.1, TIMES), 0)


class ConditionalDenoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time, self.label = nn.Embedding(TIMES, width), nn.Embedding(CLASSES + 1, width)
        self.inp = nn.Linear(DIM, width)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, DIM)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, batch):
        h = self.inp(batch["x"]) + self.time(batch["t"]) + self.label(batch["label"])
        return self.out(self.mid(h))


centers = torch.tensor([[1.5, 0.0], [-1.5, 0.0], [0.0, 1.5], [0.0, -1.5]])


def get_batch():
    label = torch.randint(0, CLASSES, (B,))
    x0 = centers[label] + 0.2 * torch.randn(B, DIM)
    t, noise = torch.randint(0, TIMES, (B,)), torch.randn(B, DIM)
    a = alpha_bar[t].unsqueeze(1)
    drop = torch.rand(B) < 0.2
    inputs = {"x": a.sqrt() * x0 + (1 - a).sqrt() * noise, "t": t, "label": label.masked_fill(drop, CLASSES)}
    return inputs, noise


STEPS = 60
model = ConditionalDenoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(STEPS):
    inputs, noise = get_batch()
    loss = (model(inputs) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, loss.item())
