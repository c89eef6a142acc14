"""Faults of trainings by Hugging Face's Trainer and by Lightning."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo import causes
from tests.zoo.case import fault
from tests.zoo.data import clusters, images, loader, padded_sums
from tests.zoo.hugging_face import causal_rows, llama, trainer_of
from tests.zoo.lightning_modules import Classifier, fit
from tests.zoo.models import ConvNet, mlp
from tests.zoo.recorder import Recorder


@fault("gpt", causes.RATE_TOO_HIGH, way="hugging face")
def trainer_rate_too_high(recorder: Recorder) -> None:
    """The Trainer trains a Llama with the learning rate 0.5 of an SGD recipe."""
    trainer = trainer_of(recorder, llama(), causal_rows(1200), learning_rate=0.5)
    recorder.attach(trainer)
    trainer.train()


@fault("gpt", causes.RATE_TOO_LOW, way="hugging face")
def trainer_rate_too_low(recorder: Recorder) -> None:
    """The Trainer trains a new Llama with the learning rate 2e-7 of a late stage of fine-tuning."""
    trainer = trainer_of(recorder, llama(), causal_rows(1200), learning_rate=2e-7, lr_scheduler_type="constant")
    recorder.attach(trainer)
    trainer.train()


@fault("gpt", causes.PADDING, way="hugging face")
def trainer_labels_contain_padding(recorder: Recorder) -> None:
    """The labels of a Llama are its inputs, padding included."""
    rows = [{"input_ids": row, "labels": row} for row in padded_sums(1200, 1).tensors[0]]
    trainer = trainer_of(recorder, llama(), rows, learning_rate=3e-3)
    recorder.attach(trainer)
    trainer.train()


@fault("gpt", causes.WITHOUT_OPTIMIZER, way="hugging face", knowable=0)
def trainer_optimizer_before_resize(recorder: Recorder) -> None:
    """The optimizer given to the Trainer was created before resize_token_embeddings."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.resize_token_embeddings(24)
    trainer = trainer_of(recorder, model, causal_rows(800), optimizers=(optimizer, None))
    recorder.attach(trainer)
    trainer.train()


@fault("gpt", (*causes.IGNORED_LABELS, *causes.NONFINITE), way="hugging face")
def trainer_labels_are_all_ignored(recorder: Recorder) -> None:
    """The template of the answers was not found in any row, so that all labels are -100."""
    rows = [{"input_ids": row, "labels": torch.full_like(row, -100)} for row in padded_sums(600, 1).tensors[0]]
    trainer = trainer_of(recorder, llama(), rows, learning_rate=1e-3)
    recorder.attach(trainer)
    trainer.train()


@fault("gpt", causes.WRONG_SHIFT, way="hugging face")
def trainer_labels_are_shifted_twice(recorder: Recorder) -> None:
    """The labels are shifted by one letter, and the model shifts them again."""
    rows = [
        {"input_ids": row, "labels": functional.pad(row[1:], (0, 1), value=-100)}
        for row in (item["input_ids"] for item in causal_rows(1200))
    ]
    trainer = trainer_of(recorder, llama(), rows, learning_rate=3e-3)
    recorder.attach(trainer)
    trainer.train()


@fault("gpt", causes.DECAY_TOO_LARGE, way="hugging face")
def trainer_decay_too_large(recorder: Recorder) -> None:
    """The Trainer has weight_decay=100, typed for 0.1."""
    trainer = trainer_of(recorder, llama(), causal_rows(1200), learning_rate=3e-3, weight_decay=100.0)
    recorder.attach(trainer)
    trainer.train()


@fault("gpt", causes.CLIPPED, way="hugging face")
def trainer_clips_too_much(recorder: Recorder) -> None:
    """The Trainer clips at 0.001 and uses SGD."""
    options = {"learning_rate": 0.05, "optim": "sgd", "max_grad_norm": 1e-3, "lr_scheduler_type": "constant"}
    trainer = trainer_of(recorder, llama(), causal_rows(1200), **options)
    recorder.attach(trainer)
    trainer.train()


@fault("mlp", causes.DOUBLE_SOFTMAX, way="lightning")
def lightning_softmax_before_cross_entropy(recorder: Recorder) -> None:
    """A Lightning module returns probabilities from forward, and its training_step passes them to cross_entropy."""
    fit(recorder, Classifier(nn.Sequential(*mlp(), nn.Softmax(-1))), loader(clusters(1280, 1)))


@fault("cnn", causes.RATE_DECAYED, way="lightning", knowable=60)
def lightning_schedule_per_step(recorder: Recorder) -> None:
    """A schedule over epochs is given to Lightning with the interval "step"."""

    class PerStep(Classifier):
        def configure_optimizers(self) -> dict:
            optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 20, 30], gamma=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    fit(recorder, PerStep(ConvNet()), loader(images(1280, 1)), loader(images(256, 4), 128))


@fault("cnn", causes.WITHOUT_OPTIMIZER, way="lightning", knowable=0)
def lightning_optimizer_of_the_head(recorder: Recorder) -> None:
    """configure_optimizers passes the head alone, as in linear probing, but the trunk is not frozen."""

    class HeadOnly(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.net.head.parameters(), 1e-2)

    fit(recorder, HeadOnly(ConvNet()), loader(images(1280, 1)), loader(images(256, 4), 128))


@fault("mlp", causes.RATE_TOO_HIGH, way="lightning")
def lightning_rate_too_high(recorder: Recorder) -> None:
    """A Lightning module of a perceptron has Adam with a learning rate of 3."""

    class Fast(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 3.0)

    fit(recorder, Fast(mlp()), loader(clusters(1280, 1)), loader(clusters(256, 3), 256))


@fault("cnn", (*causes.EVAL_MODE, *causes.NORM_FROZEN), way="lightning", knowable=1)
def lightning_backbone_in_eval_mode(recorder: Recorder) -> None:
    """A Lightning module calls eval() on its network in on_train_epoch_start, although it is trained."""

    class Evaluating(Classifier):
        def on_train_epoch_start(self) -> None:
            self.net.eval()

    fit(recorder, Evaluating(ConvNet()), loader(images(1280, 1)), loader(images(256, 4), 128))


@fault("mlp", causes.NO_GRADIENT, way="lightning")
def lightning_auxiliary_head_is_unused(recorder: Recorder) -> None:
    """A Lightning module has an auxiliary head whose loss is computed and not added."""

    class TwoHeads(Classifier):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.auxiliary = nn.Linear(20, 10)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            auxiliary_loss = functional.cross_entropy(self.auxiliary(batch[0]), batch[1])
            self.log("auxiliary_loss", auxiliary_loss)
            return loss

    fit(recorder, TwoHeads(mlp()), loader(clusters(1280, 1)))
