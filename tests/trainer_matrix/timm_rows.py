"""Trainings of timm's models with its optimizers, schedulers and augmentations."""

from typing import Any

import torch
from torch import nn

from tests.trainer_matrix.row import Attach, rows
from tests.trainer_matrix.tiny import chosen, drawn, loader


@rows("timm, vision transformer with mixup and an average", "timm", "torchvision")
def vision(attach: Attach, accumulate: int = 1, clip: float = 0.0, evaluates: bool = False) -> None:
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 4}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, drop_path_rate=0.1, proj_drop_rate=0.1)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-2, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=12, warmup_t=2, t_in_epochs=False)
    mixup, average, criterion = Mixup(0.8, 1.0, num_classes=4), ModelEmaV3(model, decay=0.9), SoftTargetCrossEntropy()
    train(attach, model, optimizer, (scheduler, mixup, average, criterion), (accumulate, clip, evaluates))


@rows(
    "timm, residual network with a library optimizer",
    "timm",
    "torchvision",
    variants={"plain": {}, "clipping": {"clip": 0.05}},
)
def residual(attach: Attach, clip: float = 0.0) -> None:
    import timm
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    model = timm.create_model("resnet10t", num_classes=4, drop_rate=0.1)
    optimizer = create_optimizer_v2(model, "lamb", lr=1e-2)
    parts = None, None, ModelEmaV3(model, decay=0.9), nn.CrossEntropyLoss()
    train(attach, model, optimizer, parts, (1, clip, False), size=32)


def train(attach: Attach, model: Any, optimizer: Any, parts: Any, variant: Any, size: int = 16) -> None:
    """Train as the script of timm does."""
    (scheduler, mixup, average, criterion), (accumulate, clip, evaluates) = parts, variant
    images = torch.utils.data.TensorDataset(drawn(24, 3, size, size), chosen(4, 24))

    def loss_of(model: nn.Module, batch: Any) -> Any:
        return criterion(model(batch[0]), batch[1]) / accumulate

    def validate() -> dict[str, float]:
        right = sum((model(batch[0]).argmax(1) == batch[1]).sum().item() for batch in loader(images))
        return {"val_accuracy": right / len(images)}

    with attach(model, optimizer, loss=loss_of, accumulate=accumulate) as scope:
        for _ in range(2):
            mixed = (batch if mixup is None else [*mixup(*batch)] for batch in loader(images))
            for index, batch in enumerate(scope.batches(mixed), start=1):
                scope.backward(loss_of(model, batch))
                if index % accumulate:
                    continue
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                average.update(model)
                if scheduler is not None:
                    scheduler.step_update(index)
            if evaluates and not attach.is_bare:
                scope.evaluate(validate)
