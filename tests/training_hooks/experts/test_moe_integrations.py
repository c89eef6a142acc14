"""moe_router in custom loops and in Hugging Face's Trainer, on a Mixtral."""

from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.training_hooks.experts import MoeRouter
from loopscope.training_hooks.experts.routers import find_routers
from loopscope.training_hooks.experts.routing import LayerCounts, count_routing, read_routing
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tests.framework.integrations.hf_trainers import InOrder, Trace, attached
from tests.support import RecordingSink
from tests.training_hooks.experts.moe_models import VOCABULARY, made, token_loss

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
TOKENS = torch.randint(VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(3))


class Rows(Dataset):
    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": TOKENS[index], "labels": TOKENS[index]}


def first_step(sink: RecordingSink) -> dict[str, Any]:
    return {name.removeprefix("moe_router/"): value for name, _, step, value in sink.rows("moe_router/") if step == 1}


def expected(rows: int) -> dict[str, float]:
    """Return the balance losses of the first rows, from the router logits that the model returns."""
    model: nn.Module = made("mixtral").train()
    with torch.no_grad():
        logits = model(TOKENS[:rows], output_router_logits=True).router_logits
    sums = [count_routing(read_routing(layer, 2)) for layer in logits]
    names = [router.name for router in find_routers(model)]
    return {
        f"balance_loss/{name}": LayerCounts.of(part.tolist()).measures()["balance_loss"]
        for name, part in zip(names, sums, strict=True)
    }


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    fixed: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    fixed |= {"save_strategy": "no", "seed": 1, "per_device_train_batch_size": 2, "max_steps": 2}
    args = TrainingArguments(str(folder), **fixed, gradient_accumulation_steps=2, **options)
    return InOrder(made("mixtral"), args, train_dataset=Rows(), callbacks=[*callbacks])


@pytest.mark.slow_rows("not reentrant", "reentrant")
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
def test_trainer_is_measured_unchanged(tmp_path: Path, checkpointing: bool | None) -> None:
    """Two micro-batches of two rows, whose layers are checkpointed or not, count as four rows."""
    options: dict[str, Any] = {}
    if checkpointing is not None:
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    bare_trace, trace, sink = Trace(), Trace(), RecordingSink()
    trainer(tmp_path / "bare", bare_trace, **options).train()
    hooked = trainer(tmp_path / "hooked", trace, **options)
    attached(hooked, [MoeRouter(interval=1, names="*")], sinks=[sink])
    hooked.train()
    for one, other in zip(trace.steps, bare_trace.steps, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    found = first_step(sink)
    assert {name: found[name] for name in expected(4)} == pytest.approx(expected(4), rel=1e-5)


def test_custom_loop_adds_micro_batches(tmp_path: Path) -> None:
    """Counts add up over the four micro-batches of a step."""
    model, sink = made("mixtral"), RecordingSink()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hook = MoeRouter(interval=1, names="*")
    with loopscope.attach(
        model, optimizer, hooks=[hook], out=tmp_path, accumulate=4, display="none", sinks=[sink], audit=True
    ) as scope:
        for batch in scope.batches([(part,) for part in TOKENS.chunk(4)]):
            scope.backward(token_loss(model, batch) / 4)
        optimizer.step()
    found = first_step(sink)
    assert {name: found[name] for name in expected(8)} == pytest.approx(expected(8), rel=1e-5)
