# law: ranks_agree
# fault: the training step calls model.module(...) to reach the plain module, which goes around DistributedDataParallel, so gradients are never synchronised
# also:
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(192)


class VAE(nn.Module):
    def __init__(self, dim=20, z=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 2 * z))
        self.decoder = nn.Sequential(nn.Linear(z, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        return self.decoder(self.encode(x)[0])

    def encode(self, x):
        mu, logvar = self.encoder(x).chunk(2, 1)
        return mu, logvar

    def loss(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
        return F.mse_loss(self.decoder(z), x) + 0.01 * kl


def main():
    data = torch.randn(1600, 4) @ torch.randn(4, 20) / 2
    data = data[rank::world]
    model = DDP(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        for start in range(0, len(data), 40):
            loss = model.module.loss(data[start : start + 40])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print("epoch", epoch, "loss", loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
