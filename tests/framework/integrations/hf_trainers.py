"""A small language model trained by Hugging Face's Trainer, with and without hooks, and its state at every step."""

from pathlib import Path
from typing import Any

import loopscope
import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.support import ActingHook
from tests.support.misbehaving_hooks import spoil_accumulation

VOCABULARY, LENGTH, ROWS = 24, 6, 14


class Rows(Dataset):
    """Token sequences, all different."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class InOrder(Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Trace(TrainerCallback):
    """Records weights, optimizer state and the random generator after every step."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any):
        held = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        self.steps.append([each.detach().clone() for each in (*model.parameters(), *held, torch.get_rng_state())])


def model(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    chances = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **chances, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLMLoss")
    )


def trainer(
    folder: Path, *callbacks: Any, dropout: float = 0.1, kind: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    fixed: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    fixed |= {"save_strategy": "no", "seed": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    args = TrainingArguments(str(folder), **{**fixed, "num_train_epochs": 2, **options})
    return kind(model(dropout), args, train_dataset=Rows(), eval_dataset=Rows(4), callbacks=[*callbacks])


def traced(folder: Path, hooks: Any = None, *, train: Any = None, **options: Any) -> tuple[list[list[Tensor]], Tensor]:
    """Train; return the trace, and the next draw. Without ``hooks`` nothing is attached."""
    trace = Trace()
    made = trainer(folder, trace, **options)
    if hooks is not None:
        attached(made, hooks, audit=True)
    (train or type(made).train)(made) if train else made.train()
    return trace.steps, torch.rand(3)


def attached(made: Trainer, hooks: Any, **choices: Any) -> Any:
    """Attach; audits, which double the time of a training, belong to the tests that compare its bytes."""
    return loopscope.attach(made, hooks=hooks, **{"display": "none", **choices})


def same(ours: tuple[list[list[Tensor]], Tensor], theirs: tuple[list[list[Tensor]], Tensor]) -> bool:
    """Return whether two traces, and the draws after them, are equal bit for bit at every step."""
    steps = zip(ours[0], theirs[0], strict=True)
    equal = all(torch.equal(a, b) for one, other in steps for a, b in zip(one, other, strict=True))
    return bool(ours[0]) and equal and torch.equal(ours[1], theirs[1])


def misbehaving_hook() -> ActingHook:
    """Return an intervention that draws, trains on and zeroes the weights, and must leave no trace."""

    def act(run_ctx: Any, model_ctx: Any) -> None:
        torch.rand(5)
        if run_ctx.batch_data is not None:
            model_ctx.take_step()
            model_ctx.compute_batch_gradients()
        with torch.no_grad():
            for parameter in model_ctx.model.parameters():
                spoil_accumulation(parameter)
                parameter.zero_()

    return type("MisbehavingHook", (ActingHook,), {"needs_pre_epoch_state": False})(act)
