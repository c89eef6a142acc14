# law: one_batch_can_be_learned
# fault: softmax inside the model and again inside nn.CrossEntropyLoss; with 10 classes the loss cannot fall below 1.46
# also:
import torch
from torch import nn

torch.manual_seed(122)
V, T, D, B, CLASSES = 30, 10, 32, 32, 10


class IntentClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        layer = nn.TransformerEncoderLayer(D, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.fc = nn.Linear(D, CLASSES)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, tokens):
        return self.softmax(self.fc(self.encoder(self.embed(tokens)).mean(1)))


def get_batch():
    y = torch.randint(0, CLASSES, (B,))
    tokens = torch.randint(0, V, (B, T))
    own = torch.rand(B, T) < 0.6
    return torch.where(own, y[:, None] + CLASSES * torch.randint(0, 3, (B, T)), tokens), y


def main():
    STEPS = 60
    model = IntentClassifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        tokens, y = get_batch()
        loss = criterion(model(tokens), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
