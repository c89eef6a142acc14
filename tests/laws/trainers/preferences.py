"""A training by the DPO or reward trainer of trl with accumulation, of the kind that the first argument names."""

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch.nn import functional as F
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from tests.trainer_matrix import tiny


class OverriddenReward(RewardTrainer):
    """Weights each pair by the tokens of its chosen answer, and divides by those of the micro-batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Divide by a number that differs between micro-batches."""
        outputs = model(**inputs)
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
        tokens = inputs["attention_mask"].sum(1).chunk(2)[0]
        loss = -(F.logsigmoid(chosen - rejected) * tokens).sum() / tokens.sum()
        return (loss, outputs) if return_outputs else loss


class UndividedReward(RewardTrainer):
    """Tells the Trainer that the mean loss of a micro-batch is already divided by their number."""

    loss_is_scaled_for_ga = True


class UndividedDPO(DPOTrainer):
    """Tells the Trainer that the mean loss of a micro-batch is already divided by their number."""

    loss_is_scaled_for_ga = True


class OverriddenDPO(DPOTrainer):
    """Adds the mean loss of the chosen tokens of a micro-batch, whose number differs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Add a mean of means."""
        tokens = inputs["input_ids"]
        outputs = model(input_ids=tokens, attention_mask=inputs["attention_mask"])
        labels = tokens.masked_fill(inputs["completion_mask"] == 0, -100)[:, 1:]
        losses = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels, reduction="none").sum(1)
        chosen, rejected = losses.chunk(2)
        tokens_of_chosen = (labels.chunk(2)[0] != -100).sum()
        loss = -F.logsigmoid(0.1 * (rejected - chosen)).mean() + chosen.sum() / tokens_of_chosen
        return (loss, outputs) if return_outputs else loss


def preferences() -> Dataset:
    """Return prompts with a chosen and a rejected answer of different lengths."""
    texts = [*tiny.sentences(30), *tiny.sentences(30), *tiny.sentences(30)]
    generator = torch.Generator().manual_seed(0)
    longer = [1 + int(torch.randint(0, 4, (), generator=generator)) for _ in texts]
    return Dataset.from_dict(
        {
            "prompt": [f"{text} :" for text in texts],
            "chosen": [" " + " ".join([text] * count) for text, count in zip(texts[::-1], longer, strict=True)],
            "rejected": [" a fish no"] * len(texts),
        }
    )


def main(kind: str) -> None:
    """Train a small model for some updates of four micro-batches."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 6,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_length": 48,
        "bf16": False,
        "learning_rate": 1e-3,
    }
    trainer: Any
    if "reward" in kind:
        classes = {"override_reward": OverriddenReward, "undivided_reward": UndividedReward}
        options |= {"center_rewards_coefficient": 0.01} if kind == "centered_reward" else {}
        trainer = classes.get(kind, RewardTrainer)(
            tiny.llama("LlamaForSequenceClassification", num_labels=1),
            RewardConfig(**options),
            train_dataset=preferences(),
            processing_class=tiny.tokenizer(),
        )
    else:
        dpo = {"override_dpo": OverriddenDPO, "undivided_dpo": UndividedDPO}
        losses = {"ipo": {"loss_type": ["ipo"]}, "hinge": {"loss_type": ["hinge"]}}
        parts: dict[str, Any] = {"ref_model": tiny.llama()}
        if kind == "precomputed_dpo":
            options |= {"precompute_ref_log_probs": True}
        if kind == "lora_dpo":
            from peft import LoraConfig

            parts = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
        trainer = dpo.get(kind, DPOTrainer)(
            tiny.llama(),
            args=DPOConfig(**options, **losses.get(kind, {})),
            train_dataset=preferences(),
            processing_class=tiny.tokenizer(),
            **parts,
        )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
