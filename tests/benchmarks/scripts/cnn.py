"""A small convolutional network with batch normalisation, with an evaluation after each epoch."""

import torch
from torch import nn

torch.manual_seed(0)
pictures, classes = torch.randn(2_048, 3, 32, 32), torch.randint(10, (2_048,))
layers = []
for before, after in ((3, 16), (16, 32), (32, 64)):
    layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
for _ in range(6):
    model.train()
    for rows in torch.randperm(len(pictures)).split(64):
        loss = nn.functional.cross_entropy(model(pictures[rows]), classes[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(pictures[:256]).argmax(1) == classes[:256]).float().mean()
