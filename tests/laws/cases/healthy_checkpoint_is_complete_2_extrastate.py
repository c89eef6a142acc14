# law: none
# near: checkpoint_is_complete
# fault: a plain float that changes outputs is saved and loaded through get_extra_state and set_extra_state
# also:
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(157)


class AnnealedSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = 2.0

    def get_extra_state(self):
        return {"temperature": self.temperature}

    def set_extra_state(self, state):
        self.temperature = state["temperature"]

    def forward(self, logits):
        return F.softmax(logits / self.temperature, dim=-1)


class Mixture(nn.Module):
    def __init__(self, dim=12, experts=4, classes=5):
        super().__init__()
        self.gate, self.softmax = nn.Linear(dim, experts), AnnealedSoftmax()
        self.first = nn.Linear(dim, experts * 32)
        self.second = nn.Parameter(0.02 * torch.randn(experts, 32, classes))
        self.experts = experts

    def forward(self, x):
        weight = self.softmax(self.gate(x))
        h = F.relu(self.first(x)).view(len(x), self.experts, 32)
        return torch.einsum("be,beh,ehc->bc", weight, h, self.second)


centers = torch.randn(15, 12)
which = torch.randint(0, 15, (1280,))
x, y = 1.5 * centers[which] + 0.5 * torch.randn(1280, 12), which % 5
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
model = Mixture()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.softmax.temperature = max(0.5, model.softmax.temperature * 0.97)
    torch.save(model.state_dict(), io.BytesIO())
    print(f"epoch {epoch} loss {loss.item():.4f} temperature {model.softmax.temperature:.3f}")
