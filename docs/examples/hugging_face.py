"""Hugging Face's Trainer with a small GPT-2 that learns sums such as 12+7=19, with hooks of loopscope attached.

Lines with the comment `# added` are those of loopscope. Nothing is downloaded.
"""

import random

import loopscope  # added
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

sums = [f"{a}+{b}={a + b};" for a in range(60) for b in range(60)]
text = "".join(random.Random(0).sample(sums, 1200))
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
rows = [{"input_ids": row, "labels": row} for row in tokens[: len(tokens) // 24 * 24].view(-1, 24)]

set_seed(0)
sizes = {"vocab_size": len(letters), "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLMLoss"))
arguments = TrainingArguments(
    "runs/hugging_face",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    max_grad_norm=1.0,
    eval_strategy="epoch",
    save_strategy="no",
    logging_steps=10,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=rows[:320], eval_dataset=rows[320:])
options = {"weight_updates": {"interval": 10}}  # added
scope = loopscope.attach(trainer, hooks=["weight_updates", "gradient_flow", "norms"], hook_options=options)  # added
trainer.train()
print("median of |update| / |weight|:", scope.last_metrics()["weight_updates/update_ratio_median"])  # added
