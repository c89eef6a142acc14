"""Imports that every process of the matrix inherits, because they take seconds; loopscope is not among them."""

import logging
from contextlib import suppress
from importlib import import_module

import tests.trainer_matrix.table  # noqa: F401

logging.disable(logging.WARNING)  # torchao lists the compiled parts that it cannot load
for _name in ("accelerate", "lightning.pytorch", "lightning.fabric", "transformers", "datasets", "peft", "timm"):
    with suppress(ImportError):
        import_module(_name)
for _path in (
    *("transformers.trainer", "transformers.trainer_seq2seq", "transformers.models.gpt2.modeling_gpt2"),
    *("transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert", "trl.trainer.sft_trainer"),
    *("trl.trainer.grpo_trainer", "trl.trainer.dpo_trainer", "sentence_transformers", "torch._dynamo"),
):
    with suppress(ImportError):
        import_module(_path)
logging.disable(logging.NOTSET)
