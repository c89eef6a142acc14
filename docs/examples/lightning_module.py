"""Lightning's Trainer with a module that learns whether a point is in a circle, with hooks of loopscope attached.

Lines with the comment `# added` are those of loopscope.
"""

import lightning
import loopscope  # added
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

points = torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
labels = (points.norm(dim=1) > 1.2).long()
train, val = TensorDataset(points[:320], labels[:320]), TensorDataset(points[320:], labels[320:])


class Classifier(lightning.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def training_step(self, batch):
        return self.loss(batch)

    def validation_step(self, batch):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)}


lightning.seed_everything(0)
module = Classifier()
trainer = lightning.Trainer(
    max_epochs=5,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
options = {"hook_options": {"weight_updates": {"interval": 10}}, "out": "runs/lightning"}  # added
scope = loopscope.attach(trainer, hooks=["weight_updates", "norms"], **options)  # added
batches, validation = DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=80)
trainer.fit(module, batches, validation)
print("median of |update| / |weight|:", scope.last_metrics()["weight_updates/update_ratio_median"])  # added
