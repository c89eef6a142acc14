"""Trainings by Hugging Face's Trainer, TRL, PEFT and sentence-transformers."""

from pathlib import Path
from typing import Any

from torch import nn

from tests.trainer_matrix import tiny
from tests.trainer_matrix.row import VARIANTS, Attach, row, rows

HF = ("transformers", "accelerate")
TRL = ("trl", "transformers", "accelerate")
COMMON: dict[str, Any] = {
    "output_dir": "out", "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", "seed": 1,
    "save_strategy": "no", "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 6, "bf16": False,
}  # fmt: skip


def settings(
    attach: Attach, accumulate: int = 1, clip: float = 0.0, evaluates: bool = False, **changed: Any
) -> dict[str, Any]:
    """Return the arguments of a Trainer; only the training with hooks evaluates."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 2} if evaluates and not attach.is_bare else {}
    return COMMON | {"gradient_accumulation_steps": accumulate, "max_grad_norm": clip} | evaluation | changed


def token_data(rows: int = 16, seed: int = 1) -> list[dict[str, Any]]:
    """Return rows of tokens that are their own labels."""
    drawn = tiny.token_rows(rows, seed)
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def dataset(**columns: Any) -> Any:
    """Create a dataset of the library datasets."""
    from datasets import Dataset

    return Dataset.from_dict(columns)


TRAINER_VARIANTS: dict[str, dict[str, Any]] = VARIANTS | {
    "bfloat16": {"bf16": True},
    "Adafactor": {"optim": "adafactor"},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@rows("Hugging Face Trainer", *HF, variants=TRAINER_VARIANTS)
def trainer(attach: Attach, **changed: Any) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**settings(attach, **changed))
    trainer = Trainer(tiny.gpt2(), arguments, train_dataset=token_data(), eval_dataset=token_data(4, 2))
    attach(trainer)
    trainer.train()


@row("Hugging Face Trainer", "resumed from its checkpoint", *HF)
def resumed_trainer(attach: Attach) -> None:
    from transformers import Trainer, TrainingArguments

    for steps, checkpoint in ((3, None), (6, "out/checkpoint-3")):
        changed = {"max_steps": steps, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
        arguments = TrainingArguments(**settings(attach, **changed))
        trainer = Trainer(tiny.gpt2(), arguments, train_dataset=token_data())
        attach(trainer, out="run_0")
        trainer.train(resume_from_checkpoint=checkpoint)


@row("Hugging Face Trainer", "evaluation, not isolated, and best weights", *HF)
def best_weights(attach: Attach) -> None:
    """Both trainings evaluate, which moves the random numbers of both."""
    from transformers import Trainer, TrainingArguments

    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    arguments = TrainingArguments(**settings(attach, load_best_model_at_end=True, **evaluation))
    trainer = Trainer(tiny.gpt2(), arguments, train_dataset=token_data(), eval_dataset=token_data(4, 2))
    attach(trainer, isolate_evaluation=False)
    trainer.train()


@rows("Hugging Face Seq2SeqTrainer, T5", *HF)
def seq2seq(attach: Attach, **changed: Any) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": tiny.VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2))
    arguments = Seq2SeqTrainingArguments(**settings(attach, **changed))
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=token_data(), eval_dataset=token_data(4, 2))
    attach(trainer)
    trainer.train()


def adapter(**changed: Any) -> Any:
    """Return the configuration of a LoRA adapter."""
    from peft import LoraConfig

    options: dict[str, Any] = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "target_modules": ["c_attn"]}
    return LoraConfig(**options | {"task_type": "CAUSAL_LM"} | changed)


@rows("PEFT LoRA in Hugging Face's Trainer", "peft", *HF)
def lora_in_trainer(attach: Attach, **changed: Any) -> None:
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments

    model = get_peft_model(tiny.gpt2(), adapter())
    arguments = TrainingArguments(**settings(attach, **changed))
    trainer = Trainer(model, arguments, train_dataset=token_data(), eval_dataset=token_data(4, 2))
    attach(trainer)
    trainer.train()


def peft_configurations() -> dict[str, Any]:
    """Return the configurations of adapters that train a causal model."""
    import peft

    causal: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    return {
        "LoRA": adapter(),
        "DoRA": adapter(use_dora=True),
        "IA3": peft.IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"], **causal),
        "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=3, **causal),
        "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=3, **causal),
        "VeRA": peft.VeraConfig(r=2, target_modules=["c_attn"], **causal),
    }


PEFT_VARIANTS = {name: {"kind": name} for name in ("LoRA", "DoRA", "IA3", "prompt tuning", "prefix tuning", "VeRA")}


@rows("PEFT in a custom loop", "peft", "transformers", variants=PEFT_VARIANTS)
def peft_loop(attach: Attach, kind: str) -> None:
    import torch
    from peft import get_peft_model

    model = get_peft_model(tiny.gpt2(), peft_configurations()[kind])
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], 1e-2)

    def loss_of(model: nn.Module, batch: Any) -> Any:
        return model(input_ids=batch, labels=batch).loss

    with attach(model, optimizer, loss=loss_of) as scope:
        for batch in scope.batches(tiny.loader(tiny.token_rows())):
            scope.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


# TRL


def stored_llama() -> str:
    """Write a model and its tokenizer, for trainers that load a second copy of their model by its path."""
    tiny.llama().save_pretrained("llama")
    tiny.tokenizer().save_pretrained("llama")
    return str(Path("llama").absolute())


def preferences() -> Any:
    """Return a dataset of prompts with a chosen and a rejected answer."""
    answers = tiny.sentences()
    return dataset(
        prompt=[f"{text} :" for text in answers],
        chosen=[f" {text}" for text in answers[::-1]],
        rejected=[" a fish no"] * len(answers),
    )


SFT_VARIANTS = VARIANTS | {"packing": {"packing": True}, "with PEFT LoRA": {"peft": True}}


@rows("TRL SFTTrainer", *TRL, variants=SFT_VARIANTS)
def sft(attach: Attach, peft: bool = False, **changed: Any) -> None:
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(**settings(attach, max_length=24, **changed))
    data = dataset(text=tiny.sentences(24))
    config = adapter(target_modules=["q_proj", "v_proj"]) if peft else None
    trainer = SFTTrainer(
        tiny.llama(),
        arguments,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        peft_config=config,
        processing_class=tiny.tokenizer(),
    )
    attach(trainer)
    trainer.train()


@rows("TRL DPOTrainer", *TRL, variants=VARIANTS | {"with PEFT LoRA": {"peft": True}})
def dpo(attach: Attach, peft: bool = False, **changed: Any) -> None:
    from trl import DPOConfig, DPOTrainer

    data, arguments = preferences(), DPOConfig(**settings(attach, max_length=24, **changed))
    parts: dict[str, Any] = (
        {"peft_config": adapter(target_modules=["q_proj", "v_proj"])} if peft else {"ref_model": tiny.llama()}
    )
    trainer = DPOTrainer(
        tiny.llama(),
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tiny.tokenizer(),
        **parts,
    )
    attach(trainer)
    trainer.train()


@rows("TRL RewardTrainer", *TRL)
def reward(attach: Attach, **changed: Any) -> None:
    from trl import RewardConfig, RewardTrainer

    data, arguments = preferences(), RewardConfig(**settings(attach, max_length=24, **changed))
    model = tiny.llama("LlamaForSequenceClassification", num_labels=1)
    trainer = RewardTrainer(
        model, arguments, train_dataset=data, eval_dataset=data.select(range(4)), processing_class=tiny.tokenizer()
    )
    attach(trainer)
    trainer.train()


def vowels(completions: list[str], **columns: Any) -> list[float]:
    """Reward completions by their length."""
    return [float(len(text) % 7) for text in completions]


@rows(
    "TRL GRPOTrainer", *TRL, variants=VARIANTS | {"with PEFT LoRA": {"peft": True}, "with a reference": {"beta": 0.1}}
)
def grpo(attach: Attach, peft: bool = False, **changed: Any) -> None:
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        **settings(attach, max_completion_length=4, num_generations=2, per_device_eval_batch_size=2, **changed)
    )
    data = dataset(prompt=[f"{text} :" for text in tiny.sentences()])
    config = adapter(target_modules=["q_proj", "v_proj"]) if peft else None
    model = stored_llama() if changed.get("beta") else tiny.llama()
    trainer = GRPOTrainer(
        model, reward_funcs=vowels, args=arguments, train_dataset=data, eval_dataset=data.select(range(4)),
        peft_config=config, processing_class=tiny.tokenizer(),
    )  # fmt: skip
    attach(trainer)
    trainer.train()


@rows("TRL RLOOTrainer", *TRL, variants={"plain": {}, "accumulation 2": {"accumulate": 2}})
def rloo(attach: Attach, **changed: Any) -> None:
    from trl import RLOOConfig, RLOOTrainer

    arguments = RLOOConfig(**settings(attach, max_completion_length=4, num_generations=2, **changed))
    data = dataset(prompt=[f"{text} :" for text in tiny.sentences()])
    trainer = RLOOTrainer(
        stored_llama(), reward_funcs=vowels, args=arguments, train_dataset=data, processing_class=tiny.tokenizer()
    )
    attach(trainer)
    trainer.train()


@rows("TRL KTOTrainer", *TRL, variants={"plain": {}, "accumulation 2": {"accumulate": 2}})
def kto(attach: Attach, **changed: Any) -> None:
    from trl import KTOConfig, KTOTrainer

    answers = tiny.sentences()
    data = dataset(
        prompt=[f"{text} :" for text in answers],
        completion=[f" {text}" for text in answers[::-1]],
        label=[bool(index % 2) for index in range(len(answers))],
    )
    arguments = KTOConfig(**settings(attach, max_length=24, **changed))
    trainer = KTOTrainer(
        tiny.llama(), ref_model=tiny.llama(), args=arguments, train_dataset=data, processing_class=tiny.tokenizer()
    )
    attach(trainer)
    trainer.train()


# sentence-transformers

SENTENCES = ("sentence-transformers", *HF)


def pairs() -> Any:
    """Return a dataset of pairs of sentences with their similarity."""
    texts = tiny.sentences()
    return dataset(sentence1=texts, sentence2=texts[::-1], score=[index / len(texts) for index in range(len(texts))])


@rows("sentence-transformers, SentenceTransformerTrainer", *SENTENCES)
def sentence_transformer(attach: Attach, **changed: Any) -> None:
    import sentence_transformers as library
    from sentence_transformers import losses
    from sentence_transformers.models import Pooling, Transformer

    body = Transformer(tiny.bert_folder(Path("bert")))
    model = library.SentenceTransformer(modules=[body, Pooling(tiny.WIDTH)], device="cpu")
    arguments = library.SentenceTransformerTrainingArguments(**settings(attach, **changed))
    data = pairs()
    trainer = library.SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        loss=losses.CosineSimilarityLoss(model),
    )
    attach(trainer)
    trainer.train()


@row("sentence-transformers, SentenceTransformerTrainer", "ranking loss", *SENTENCES)
def ranking(attach: Attach) -> None:
    import sentence_transformers as library
    from sentence_transformers import losses
    from sentence_transformers.models import Pooling, Transformer

    body = Transformer(tiny.bert_folder(Path("bert")))
    model = library.SentenceTransformer(modules=[body, Pooling(tiny.WIDTH)], device="cpu")
    arguments = library.SentenceTransformerTrainingArguments(**settings(attach, per_device_train_batch_size=4))
    data = dataset(anchor=tiny.sentences(), positive=tiny.sentences()[::-1])
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = library.SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss)
    attach(trainer)
    trainer.train()


@rows(
    "sentence-transformers, CrossEncoderTrainer",
    *SENTENCES,
    variants={"plain": {}, "accumulation 2": {"accumulate": 2}},
)
def cross_encoder(attach: Attach, **changed: Any) -> None:
    import sentence_transformers as library
    from sentence_transformers.cross_encoder import CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    model = library.CrossEncoder(tiny.bert_folder(Path("bert")), num_labels=1, device="cpu")
    arguments = CrossEncoderTrainingArguments(**settings(attach, **changed))
    trainer = library.CrossEncoderTrainer(model, arguments, train_dataset=pairs(), loss=BinaryCrossEntropyLoss(model))
    attach(trainer)
    trainer.train()
