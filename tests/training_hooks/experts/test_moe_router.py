"""moe_router against the router outputs of the models themselves, and with planted collapses."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import RunNotice, UnsuitableError, UsageError
from loopscope.hooks import EVERY_STEP, TrainingHook
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState, without_on_demand
from loopscope.training import TrainingTask
from loopscope.training_hooks.experts import MoeRouter
from loopscope.training_hooks.experts.routers import find_routers
from loopscope.training_hooks.experts.routing import LayerCounts, count_routing, read_routing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import RecordingSink, differences, run_info
from tests.training_hooks.experts.moe_models import MODELS, VOCABULARY, Mixture, made, token_loss

ROWS, LENGTH = 6, 7
ALL = {"interval": 1, "names": "*"}


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))


def trained(
    model: nn.Module, hooks: list[TrainingHook], *, loss: Any = token_loss, audit: bool = True, **options: Any
) -> tuple[dict[str, Any], TrainingState]:
    """Train one step on all rows, and return the metrics and the state."""
    loader = TensorLoader((tokens(),), ROWS, fixed_order(torch.arange(ROWS)))
    task = TrainingTask(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader, loss, length=1, **options)
    state, sink = TrainingState(model, task.optimizer, RandomStreams(7)), RecordingSink()
    manager = HookManager(hooks, task, state, sinks=[sink], audit=audit)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    manager.end("completed")
    return {name.removeprefix("moe_router/"): value for name, _, _, value in sink.rows("moe_router/")}, state


def mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture()


def own_routing(model: nn.Module, batch: Tensor) -> tuple[Tensor, ...]:
    """Return the router logits that the model itself returns."""
    with torch.no_grad():
        model.train()
        return model(batch, output_router_logits=True).router_logits


@pytest.mark.trainer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_measures_match_the_models_router_outputs(name):
    """Load and balance follow from the logits that the model returns with output_router_logits=True."""
    model = made(name)
    logits = own_routing(model, tokens())
    routers, found = find_routers(model), trained(model, [MoeRouter(**ALL)])[0]
    assert len(routers) == len(logits) == 2
    for router, layer in zip(routers, logits, strict=True):
        wide = layer.double()
        chosen = wide.topk(router.top_k).indices.flatten().tolist()
        loads = [chosen.count(expert) for expert in range(wide.shape[1])]
        shares, mean = wide.softmax(-1).mean(0).tolist(), len(chosen) / len(loads)
        balance = sum(load / mean * share for load, share in zip(loads, shares, strict=True))
        assert found[f"balance_loss/{router.name}"] == pytest.approx(balance, rel=1e-5)
        assert found[f"router_z/{router.name}"] == pytest.approx(wide.logsumexp(-1).square().mean().item(), rel=1e-5)
        assert [found[f"load/{router.name}/{expert}"] for expert in range(len(loads))] == [v / mean for v in loads]


@pytest.mark.trainer
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_balance_loss_is_that_of_transformers(name):
    """In a model of one layer, transformers' auxiliary loss is k times balance_loss."""
    model = made(name, output_router_logits=True, router_aux_loss_coef=0.0)
    model.model.layers = model.model.layers[:1]
    with torch.no_grad():
        auxiliary = model(tokens(), output_router_logits=True).aux_loss.item()
    found, _ = trained(model, [MoeRouter(**ALL)])
    assert found["balance_loss"] * find_routers(model)[0].top_k == pytest.approx(auxiliary, rel=1e-5)


@pytest.mark.trainer
def test_deepseek_has_sigmoid_scores_and_chosen_experts():
    """The chosen experts are the router's own: limited to groups, and by scores with a bias."""
    model = made("deepseek_v3")
    gate = model.get_submodule("model.layers.1.mlp.gate")
    gate.e_score_correction_bias[0] = 5.0
    outputs: list[tuple[Tensor, ...]] = []
    handle = gate.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    own_routing(model, tokens())
    handle.remove()
    (router,) = find_routers(model)
    assert (router.name, router.scores, router.top_k) == ("model.layers.1.mlp.gate", "sigmoid", 2)
    found, _ = trained(model, [MoeRouter(**ALL)])
    logits, _, chosen = outputs[0]
    scores = logits.double().sigmoid()
    loads = torch.bincount(chosen.flatten(), minlength=8) / (chosen.numel() / 8)
    balance = (loads * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum().item()
    assert found["balance_loss"] == pytest.approx(balance, rel=1e-5)
    assert found[f"load/{router.name}/0"] == 4.0  # every token chooses it


@pytest.mark.some_rows(3)
@pytest.mark.trainer
@pytest.mark.parametrize("name", MODELS)
def test_planted_collapse_is_found(name):
    """A constant in the router's logits of one expert: all tokens choose it, and one layer is worst."""
    model = made(name)
    routers = find_routers(model)
    module = model.get_submodule(routers[-1].name)
    if isinstance(getattr(module, "bias", None), nn.Parameter):
        nn.init.constant_(module.bias[1], 50.0)
    else:  # the hidden states get a constant feature, to which only one expert reacts
        constant = torch.full((), 30.0)
        module.register_forward_pre_hook(
            lambda module, inputs: (torch.cat([inputs[0][..., :-1], constant.expand_as(inputs[0][..., :1])], -1),)
        )
        nn.init.constant_(module.weight[:, -1], 0.0)
        nn.init.constant_(module.weight[1, -1], 2.0)
    found, _ = trained(model, [MoeRouter(**ALL)])
    experts = len([key for key in found if key.startswith(f"load/{routers[-1].name}/")])
    full = experts / routers[-1].top_k
    assert found[f"load/{routers[-1].name}/1"] == found["max_violation"] + 1
    assert found["max_violation"] + 1 >= (full if routers[-1].scores == "softmax" else 0.8 * full)  # groups limit it
    assert found["balance_loss"] > (0.9 * full if routers[-1].scores == "softmax" else 1.05)


@pytest.mark.longer
@pytest.mark.parametrize("parts", [2, 3])
def test_micro_batches_add_up(parts):
    whole, _ = trained(mixture(), [MoeRouter(**ALL)])
    split, _ = trained(mixture(), [MoeRouter(**ALL)], accumulation_steps=parts)
    assert split == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow_rows("False")
@pytest.mark.trainer
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_count_once(reentrant):
    """Both kinds of activation checkpointing give the counts of the run without."""
    plain, _ = trained(made("mixtral"), [MoeRouter(**ALL)])
    model = made("mixtral")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    found, _ = trained(model, [MoeRouter(**ALL)])
    assert found == pytest.approx(plain, rel=1e-6)


@pytest.mark.slow_rows("gpt_oss")
@pytest.mark.trainer
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_run_has_the_bytes_of_the_bare_run(name):
    """An audit compares every byte around each call, and the final states are equal."""
    _, hooked = trained(made(name), [MoeRouter(**ALL)])
    _, bare = trained(made(name), [])
    assert not differences(without_on_demand(hooked.digest()), without_on_demand(bare.digest()))


@pytest.mark.longer
def test_bfloat16_routers_are_read():
    found, _ = trained(mixture().bfloat16(), [MoeRouter(**ALL)])
    assert 0.9 < found["balance_loss"] < 2
    assert found["router_z"] > 0


def in_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return token_loss(model, batch)


@pytest.mark.longer
def test_autocast_logits_are_read_as_computed():
    """The logits of the pass are bfloat16, and are counted as they are."""
    model = mixture()
    seen: list[Tensor] = []
    model.layers[0].gate.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    found, _ = trained(model, [MoeRouter(**ALL)], loss=in_autocast)
    assert seen[0].dtype == torch.bfloat16
    layer = LayerCounts.of(count_routing(read_routing(seen[0], 2)).tolist()).measures()
    assert found["router_z/layers.0.gate"] == layer["router_z"]


# Modules without transformers


@pytest.mark.longer
def test_custom_modules_are_found_by_their_experts():
    model = mixture()
    assert [router.name for router in find_routers(model)] == ["layers.0.gate", "layers.1.gate"]
    assert {router.top_k for router in find_routers(model)} == {2}
    found, _ = trained(model, [MoeRouter(**ALL)])
    assert sum(found[f"load/layers.1.gate/{expert}"] for expert in range(4)) == pytest.approx(4)


@pytest.mark.longer
def test_named_modules_are_routers():
    """Any module that returns logits, with top_k from the option."""
    model = mixture()
    hook = MoeRouter(interval=1, routers="layers.*.gate, head", top_k=3, names="head*")
    found, _ = trained(model, [hook])
    assert {name for name in found if name.startswith("balance_loss/")} >= {"balance_loss/head"}
    assert found["load/head/0"] >= 0


@pytest.mark.longer
def test_checkpointed_custom_layers_count_once():
    class Checkpointed(Mixture):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=True)
            return self.head(x)

    plain, _ = trained(mixture(), [MoeRouter(**ALL)])
    torch.manual_seed(0)
    assert trained(Checkpointed(), [MoeRouter(**ALL)])[0] == pytest.approx(plain, rel=1e-6)


@pytest.mark.trainer
def test_defaults_report_few_series_per_family():
    """Of 2 × 6 experts the five with the largest and the three with the smallest loads are reported."""
    found, _ = trained(made("qwen3_moe"), [MoeRouter(interval=1)])
    loads = {name: value for name, value in found.items() if name.startswith("load/")}
    every, _ = trained(made("qwen3_moe"), [MoeRouter(**ALL)])
    ranked = sorted(value for name, value in every.items() if name.startswith("load/"))
    assert sorted(loads.values()) == sorted([*ranked[:3], *ranked[-5:]])


@pytest.mark.longer
def test_whole_families_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "unused").mkdir()
    monkeypatch.chdir(tmp_path)
    trained(mixture(), [MoeRouter(interval=1, write_all=True, top=0, bottom=0)])
    (line,) = (tmp_path / "unused" / MoeRouter.file_names("only")[0]).read_text().splitlines()
    assert '"load": {"layers.0.gate/0"' in line


def test_steps_between_intervals_are_not_measured():
    hook = MoeRouter(interval=3)
    assert [step for step in range(1, 8) if hook.step_schedule.is_due(step)] == [1, 4, 7]


# Refusals


def test_models_without_experts_are_refused():
    with pytest.raises(UnsuitableError, match="found no router in the model; name the modules"):
        find_routers(nn.Sequential(nn.Linear(3, 3)))


def test_unknown_top_k_is_refused():
    model = Mixture()
    for layer in model.layers:
        layer.chosen, layer.top_k = layer.top_k, None
    with pytest.raises(UnsuitableError, match=r"number of experts per token of the routers layers.0.gate"):
        find_routers(model)


def test_patterns_without_a_module_are_refused():
    with pytest.raises(UsageError, match=r"the pattern 'layer\.\*', which matches no module"):
        find_routers(Mixture(), ["layer.*"])


@pytest.mark.parametrize(
    ("option", "value"), [("interval", 0), ("top_k", -1), ("capacity_factor", math.nan), ("scores", "x"), ("top", -1)]
)
def test_invalid_options_are_refused(option, value):
    with pytest.raises(UsageError, match=rf"moe_router.{option} is {value!r}"):
        MoeRouter(**{option: value})


@pytest.mark.longer
def test_outputs_without_logits_are_reported_once():
    """The module returns no logits: one notice, and no metrics."""
    torch.manual_seed(0)
    hook = MoeRouter(routers="embedding", interval=1)
    hook.step_schedule = EVERY_STEP
    model = Mixture()
    with pytest.warns(RunNotice, match="cannot read the outputs of embedding") as caught:
        found, _ = trained(model, [hook])
    assert found == {}
    assert len([item for item in caught if "moe_router" in str(item.message)]) == 1
