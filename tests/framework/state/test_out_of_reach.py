"""Objects with an unreadable state are refused by name; common models and schedulers are accepted."""

import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loopscope.checkpoints.content import load_checkpoint, save_checkpoint
from loopscope.errors import LoopscopeError, RunNotice, UsageError
from loopscope.hooks import HookPoint
from loopscope.isolation import Isolation, StateCopy
from loopscope.state import RandomStreams, TrainingState, differing
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.framework.runs.small_experiment import Small
from tests.framework.state.test_third_party_objects import CALL
from tests.support import ActingHook, Case, SpyHook, at, train
from tests.support.odd_objects import Named, Slotted


class Opaque(BytesIO):
    """An object with a state that is out of reach."""


def write_to(stream: Opaque, *_: Any) -> None:
    stream.write(b"a")


OUT_OF_REACH: dict[str, tuple[str, Callable[[TrainingState], Any]]] = {
    "stream on a module": ("modules/0.cache/list/0 is a .*Opaque", lambda s: setattr(s.model[0], "cache", [Opaque()])),
    "iterator on a module": (r"modules/\.kept is a .*list_iterator", lambda s: setattr(s.model, "kept", iter([1]))),
    "iterator in slots": (
        r"modules/\.kept/attributes/count is a itertools\.count",
        lambda s: setattr(s.model, "kept", Slotted(count())),
    ),
    "generator of an optimizer": (
        "optimizer/order is a .*generator",
        lambda s: setattr(s.optimizer, "order", (item for item in [1])),
    ),
    "stream in a hook": (
        r"module hooks/\S* is a .*Opaque",
        lambda s: s.model.register_forward_hook(partial(write_to, Opaque())),
    ),
}


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("name", OUT_OF_REACH)
def test_unreachable_state_is_refused_with_an_intervention(name: str) -> None:
    """The error names the object and suggests Transient."""
    sentence, put = OUT_OF_REACH[name]
    changed = lambda task, state: put(state)
    with pytest.raises(UsageError, match=rf"{sentence}: the state of such an object is out of reach, .*Transient"):
        train(Case(), [ActingHook(lambda *_: None)], introduce=changed)


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("name", OUT_OF_REACH)
def test_unreachable_state_is_a_notice_with_observers(name: str) -> None:
    """A run with observers only reports an object with inaccessible state, and trains."""
    sentence, put = OUT_OF_REACH[name]
    with pytest.warns(RunNotice, match=sentence):
        train(Case(), [SpyHook()], steps=2, introduce=lambda task, state: put(state))


def test_unreachable_state_added_later_is_refused() -> None:
    """The object appears in a step, and the next snapshot raises."""

    def act(run_ctx: Any, model_ctx: Any) -> None:
        return None

    def arrive(task: Any, state: TrainingState) -> None:
        plain = task.compute_loss
        task.compute_loss = lambda model, batch: setattr(model, "late", iter([1])) or plain(model, batch)

    with pytest.raises(LoopscopeError, match=r"modules/\.late is a \S*list_iterator"):
        train(Case(), [at(ActingHook, HookPoint.POST_STEP)(act)], introduce=arrive)


def test_unreachable_state_is_ignored_without_hooks() -> None:
    assert train(Case(), steps=2, introduce=lambda task, state: setattr(task.model, "kept", iter([1]))).error is None


class Rows(Dataset):
    """Data in memory behind a handle whose state cannot be read."""

    def __init__(self) -> None:
        self.rows, self.file, self.seen = torch.zeros(1000), Opaque(), 0


class Holding(Small):
    """An experiment that holds data."""

    def __init__(self) -> None:
        self.rows = Rows().rows


@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("make", [Rows, lambda: DataLoader(Rows()), Holding])
def test_data_reached_by_closures_are_not_copied(make: Callable[[], Any]) -> None:
    """A dataset that a forward hook of the model refers to is not audited either."""
    model, data = nn.Linear(2, 2), make()
    model.register_forward_hook(lambda *_: setattr(data, "seen", 1))
    state = TrainingState(model, torch.optim.SGD(model.parameters()), RandomStreams(1))
    model.kept = [data]
    assert state.out_of_reach() == ""
    assert max(copy.numel() for copy in StateCopy().save(state).tensors.values()) == 4
    original, isolation = state.digest(), Isolation(state, audit=True)
    with isolation.visit():
        isolation.observe(CALL, lambda: setattr(data, "seen", 2))
    assert differing(original, state.digest()) == []


class Lightningish(nn.Module):
    """Has the attributes of a LightningModule: hyper-parameters, flags, a trainer, a logger, a compiler's context."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self._hparams = Named(lr=0.1, betas=(0.9, 0.99))
        self._trainer, self._dtype, self._device = None, torch.float32, torch.device("cpu")
        self._metric_attributes: dict[int, str] | None = None
        self.trainer = SimpleNamespace(
            model=self, callbacks=[lambda: self], log_dir=Path("logs"), lock=threading.Lock()
        )
        self.log_to, self.kinds = logging.getLogger("lightningish"), {nn.Linear: nn.Conv1d}
        self.watchers = weakref.WeakSet([self.layer])
        self.keys, self.hints = self.kinds.keys(), {"a": int | str, "b": list[int]}


def with_tokenizer() -> nn.Module:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    model, words = nn.Linear(2, 2), tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    model.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    return model


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)


def made_by_transformers(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
        return transformers.LlamaForCausalLM(config)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2))
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    return transformers.BertForSequenceClassification(config)


COMMON = {
    "lightning": Lightningish,
    "tokenizer": with_tokenizer,
    "lstm": lambda: nn.LSTM(2, 2, 2),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    "average": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
    **{kind: partial(made_by_transformers, kind) for kind in ("llama", "gpt2", "bert")},
}


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("name", COMMON)
def test_common_models_and_schedulers_are_fully_restored(name: str, tmp_path: Path) -> None:
    """They pass a snapshot, an audit and a checkpoint."""

    def made() -> TrainingState:
        torch.manual_seed(1)
        model = COMMON[name]()
        optimizer = torch.optim.AdamW(model.parameters())
        return TrainingState(model, optimizer, RandomStreams(1), scheduler=plateau(optimizer))

    state = made()
    assert state.out_of_reach() == ""
    original, snapshot, isolation = state.digest(), StateCopy().save(state), Isolation(state, audit=True)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.scheduler.step(1.0)
    snapshot.restore(state)
    assert differing(original, state.digest()) == []
    with isolation.visit():
        isolation.observe(CALL, lambda: None)
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    load_checkpoint(tmp_path / "a", fresh := made())
    assert differing(original, fresh.digest()) == []
