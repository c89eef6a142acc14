"""Trainers that compile the model: hooks read its graphs, and every step keeps its bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.framework.integrations import hf_trainers
from tests.framework.integrations.test_lightning import Classifier, fit
from tests.support.models import mean_loss

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*:UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning"),
]
HOOKS = ["activations", "gradient_flow"]


def check_record(folder: Path, *, may_change_bits: bool = False) -> None:
    """Check that graphs were compared and both hooks have reported, or, with inductor, what changes bits is named."""
    summary = json.loads((folder / "summary.json").read_text())
    assert not summary["hooks_left_out"]
    assert summary["compiled_graphs"]["compared"] > 0
    text = "".join(path.read_text() for path in folder.glob("*.jsonl"))
    are_reported = all(f'"{name}/' in text for name in HOOKS)
    assert are_reported or (may_change_bits and summary["compiled_graphs"]["changed_by"])


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_of_hugging_face_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """The state after every step is that of the Trainer alone, which has as many graphs and breaks."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the option sets it for all later trainers
    steps: list[list[list[Tensor]]] = []
    graphs = []
    options: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": backend, "num_train_epochs": 1}
    for name, hooks in (("bare", None), ("hooked", HOOKS)):
        torch._dynamo.reset()
        counters.clear()
        steps.append(hf_trainers.traced(tmp_path / name, hooks, **options)[0])
        graphs.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    assert graphs[0] == graphs[1]
    assert graphs[0][0] > 0
    assert len(steps[0]) == 7
    for bare, hooked in zip(*steps, strict=True):
        assert all(map(torch.equal, bare, hooked))
    check_record(tmp_path / "hooked/loopscope-runs/run_0", may_change_bits=backend == "inductor")


class Net(nn.Module):
    """Calls layers; dynamo compiles no container."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Silent(Classifier):
    """Logs nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mean_loss(self.net, batch)


@pytest.mark.compile
@pytest.mark.slow_rows("net")
@pytest.mark.parametrize("place", ["module", "net"])
def test_compiled_modules_of_lightning_are_read(tmp_path: Path, place: str) -> None:
    """The module is wrapped, or the network in it is compiled in place."""

    def compiled() -> Any:
        module = Silent()
        module.net = Net(module.net)
        if place == "net":
            module.net.compile(backend="aot_eager")
            return module
        return torch.compile(module, backend="aot_eager")

    traces, graphs = [], []
    for hooks in ((), HOOKS):
        torch._dynamo.reset()
        counters.clear()
        traces.append(fit(tmp_path, hooks, module=compiled, max_epochs=1)[0])
        graphs.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    assert traces[0] == traces[1]
    assert graphs[0] == graphs[1]
    check_record(tmp_path / "run")
