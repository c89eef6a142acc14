"""token_loss against sums over single tokens in float64, in its agreement with the training loss, and by source."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.errors import HookError, RunNotice, UsageError
from loopscope.state import without_on_demand
from loopscope.training_hooks.outputs import TokenLoss
from loopscope.training_hooks.outputs.token_loss import (
    frequency_tenths,
    position_bins,
    position_names,
    sums_by_group,
    token_losses,
)
from torch import Tensor, nn
from torch.nn import functional

from tests.support import differences
from tests.training_hooks.outputs.output_runs import (
    CASES,
    VOCABULARY,
    Tagger,
    case,
    cases,
    drawn,
    pair_loss,
    rows_of,
    softmax,
    trained,
)


def measured(name: str, batch: Any = None, hook: TokenLoss | None = None, **options: Any) -> dict[str, Any]:
    model, loss, own = case(name)
    return trained(model, [hook or TokenLoss(interval=1)], loss, own if batch is None else batch, **options)[0][1]


def tenth_by_hand(counts: Counter[int]) -> dict[int, int]:
    """Return the tenth, from 1, of every token: that of the middle of its part of all counts."""
    total, before, tenths = sum(counts.values()), 0, {}
    for token in sorted(counts, key=lambda token: (-counts[token], token)):
        tenths[token] = int((before + counts[token] / 2) / total * 10) + 1
        before += counts[token]
    return tenths


def bin_by_hand(position: int) -> str:
    if position < 2:
        return str(position)
    first = 2 ** int(math.log2(position))
    return f"{first}-{2 * first - 1}"


def by_hand(rows: list[tuple[list[float], int, int]]) -> dict[str, float]:
    """Sum the loss of every token."""
    tenths = tenth_by_hand(Counter(target for _, target, _ in rows))
    losses: dict[str, list[float]] = {}
    for logits, target, position in rows:
        loss = -math.log(softmax(logits)[0][target])
        keys = ["mean", f"frequency/{tenths[target]}"]
        keys += [f"position/{bin_by_hand(position)}"] if position >= 0 else []
        for key in keys:
            losses.setdefault(key, []).append(loss)
    return {key: sum(values) / len(values) for key, values in losses.items()} | {"tokens": len(rows)}


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("name", CASES)
def test_losses_match_sums_by_hand(name):
    """By position, by tenth of the frequency, and over all tokens; without those that are ignored."""
    model, _, batch = case(name)
    model.train()
    found = measured(name)
    assert found.pop("unexplained") == pytest.approx(0, abs=1e-5)
    assert found == pytest.approx(by_hand(rows_of(name, model, batch)), rel=1e-4)


@pytest.mark.longer
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", cases("llama", "lstm"))
def test_micro_batches_add_up(name, parts):
    """The step's loss is the mean of those of the micro-batches, whose tokens differ in number."""
    split, whole = measured(name, accumulation_steps=parts), measured(name)
    split.pop("unexplained")
    whole.pop("unexplained")
    assert split == pytest.approx(whole, rel=1e-5)


@pytest.mark.longer
@pytest.mark.parametrize("name", cases("llama", "lstm"))
def test_weighted_mean_is_the_training_loss(name):
    """Of micro-batches with equally many tokens the mean is the loss; a penalty of 0.5 is unexplained."""
    model, loss, batch = case(name)
    tokens = drawn(6, 9)
    full = {"input_ids": tokens, "labels": tokens} if isinstance(batch, dict) else (tokens, tokens)
    found, _ = trained(
        model, [TokenLoss(interval=1)], lambda model, batch: loss(model, batch) + 0.5, full, accumulation_steps=3
    )
    assert found[1]["unexplained"] == pytest.approx(0.5, abs=1e-5)


@pytest.mark.longer
def test_weighted_labels_leave_the_difference():
    """With label smoothing, the difference to the training loss is reported."""
    model, _, batch = case("lstm")

    def smoothed(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), label_smoothing=0.3)

    found, _ = trained(model, [TokenLoss(interval=1)], smoothed, batch)
    expected = smoothed(case("lstm")[0], batch) - pair_loss(case("lstm")[0], batch)
    assert found[1]["unexplained"] == pytest.approx(expected.item(), rel=1e-3)


# Targets that only the loss gets


class Tags(Tagger):
    """The same classifier, whose output is no tensor of logits."""

    def forward(self, tokens: Tensor) -> Any:
        return {"tags": super().forward(tokens)}


def loss_of_named(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch whose names are unusual, so that only the graph of the loss has the targets."""
    output = model(batch["rows"])
    tags = output["tags"] if isinstance(output, dict) else output
    if tags.shape[:-1] == batch["wanted"].shape:
        return functional.cross_entropy(tags.flatten(0, -2), batch["wanted"].flatten())
    return functional.cross_entropy(tags, batch["wanted"])


@pytest.mark.longer
@pytest.mark.parametrize(("name", "parts"), [("lstm", 1), ("lstm", 3), ("segmenter", 1), ("tags", 1)])
def test_targets_are_read_from_the_loss(name, parts):
    """The measures are those of a run that finds logits and targets itself."""
    plain = "lstm" if name == "tags" else name
    model, _, (rows, labels) = case(plain)
    if name == "tags":
        torch.manual_seed(0)
        model = Tags()
    hook, batch = TokenLoss(interval=1), {"rows": rows, "wanted": labels}
    found = trained(model, [hook], loss_of_named, batch, accumulation_steps=parts)[0][1]
    assert found == pytest.approx(measured(plain, accumulation_steps=parts), rel=1e-5, abs=1e-6)


def test_the_loss_replaces_no_named_labels():
    model, _, (rows, labels) = case("segmenter")
    with pytest.warns(RunNotice, match="have no known targets"):
        found, _ = trained(
            model, [TokenLoss(interval=1, labels="absent")], loss_of_named, {"rows": rows, "wanted": labels}
        )
    assert found[1] == {}


# Steps without a measurement


def test_targets_that_are_all_ignored_are_reported():
    model, _, (tokens, targets) = case("lstm")
    batch = (tokens, torch.full_like(targets, -100))
    with pytest.warns(RunNotice, match="no token of step 1 has a target, since all are ignored"):
        found, _ = trained(model, [TokenLoss(interval=1)], lambda model, batch: model(batch[0]).sum() * 0, batch)
    assert found[1]["tokens"] == 0
    assert math.isnan(found[1]["mean"])


def test_models_that_are_called_twice_are_reported():
    model, loss, batch = case("lstm")
    with pytest.warns(RunNotice, match="was called 2 times in a step, which does not account for every row"):
        found, _ = trained(
            model, [TokenLoss(interval=1)], lambda model, batch: loss(model, batch) + loss(model, batch), batch
        )
    assert found[1] == {}


# Groups


@pytest.mark.parametrize("seed", range(3))
def test_tenths_match_a_loop(seed):
    counts = drawn(40, high=9, seed=seed)
    counts[3] = 400  # one token has more than half of all counts
    expected = tenth_by_hand(Counter({token: count for token, count in enumerate(counts.tolist()) if count}))
    found = frequency_tenths(counts)
    assert {token: int(found[token]) + 1 for token in expected} == expected


def test_tenths_are_exact_for_large_counts():
    """Ten equal counts of 2^55 are ten groups."""
    assert frequency_tenths(torch.full((10,), 2**55)).tolist() == list(range(10))


def test_positions_are_in_bins_that_double():
    names, positions = position_names(), torch.tensor([0, 1, 2, 3, 4, 7, 8, 1023, 1024, 16383, 16384, 10**6])
    bins = position_bins(positions).tolist()
    assert len(names) == 16
    assert [names[number] for number in bins] == [
        *("0", "1", "2-3", "2-3", "4-7", "4-7", "8-15", "512-1023", "1024-2047", "8192-16383", "16384-", "16384-")
    ]


def test_sums_by_group_match_loops():
    losses, groups, counted = torch.rand(50), drawn(50, high=4), drawn(50, high=2, seed=1).bool()
    found = sums_by_group(losses, groups, counted, 4)
    for group in range(4):
        chosen = [
            loss for loss, own, counts in zip(losses.tolist(), groups, counted, strict=True) if own == group and counts
        ]
        assert found[:, group].tolist() == pytest.approx([sum(chosen), len(chosen)])


@pytest.mark.parametrize("power", [-126, -30, 30, 100])
def test_losses_are_exact_at_powers_of_two(power):
    """Differences of logits are as in float64, also if ln Z is large."""
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 2.0**power
    expected = functional.cross_entropy(logits.double(), torch.arange(6) % 5, reduction="none")
    assert torch.allclose(token_losses(logits, torch.arange(6) % 5).double(), expected, rtol=1e-5)


@pytest.mark.longer
def test_frequencies_are_those_of_all_measured_steps():
    """In the second step, the first step's targets count as well."""
    model, loss, _ = case("lstm")
    first, second = (torch.zeros(6, 9).long(), drawn(6, 9, seed=8))
    found, _ = trained(model, [TokenLoss(interval=1)], loss, (first, first), (second, second))
    counts = Counter(first.flatten().tolist()) + Counter(second.flatten().tolist())
    tenths = {tenth_by_hand(counts)[token] for token in second.flatten().tolist()}
    assert {int(name.removeprefix("frequency/")) for name in found[2] if "frequency" in name} == tenths
    assert min(tenths) == 3  # token 0 has more than half of all counts, and its middle is in the third tenth


# Sources


def sourced(hook: TokenLoss, tags: Any, **options: Any) -> dict[str, Any]:
    model, _, (tokens, labels) = case("lstm")
    batch = {"tokens": tokens, "labels": labels, "origin": tags}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return pair_loss(model, (batch["tokens"], batch["labels"]))

    return trained(model, [hook], loss, batch, **options)[0][1]


@pytest.mark.longer
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["texts", "numbers", "per token"])
def test_losses_by_source_match_sums_by_hand(kind, parts):
    """A tag per row, as text or number, or one per token; split into micro-batches or not."""
    model, _, (tokens, labels) = case("lstm")
    tags = {"texts": ["web", "code", "web", "book", "code", "web"], "numbers": torch.tensor([1, 0, 1, 2, 0, 1])}
    tags["per token"] = drawn(6, 9, high=3)
    own = tags[kind]
    found = sourced(TokenLoss(interval=1, source="origin"), own, accumulation_steps=parts)
    losses: dict[str, list[float]] = {}
    for row, row_logits in enumerate(model(tokens).detach().double()):
        for place, logits in enumerate(row_logits.tolist()):
            if labels[row, place] >= 0:
                tag = own[row][place] if kind == "per token" else own[row]
                losses.setdefault(str(tag if isinstance(tag, str) else int(tag)), []).append(
                    -math.log(softmax(logits)[0][int(labels[row, place])])
                )
    assert {name.removeprefix("source/"): value for name, value in found.items() if "source/" in name} == (
        pytest.approx({tag: sum(values) / len(values) for tag, values in losses.items()}, rel=1e-4)
    )


@pytest.mark.longer
def test_few_sources_are_reported():
    """Those with the largest and smallest losses, and the named ones; the file has all of them."""
    tags = [f"s{number}" for number in range(6)]
    every = sourced(TokenLoss(interval=1, source="origin"), tags)
    ranked = sorted((value, name) for name, value in every.items() if "source/" in name)
    few = sourced(TokenLoss(interval=1, source="origin", top=1, bottom=1, names="s0*"), tags)
    assert {name for name in few if "source/" in name} == {ranked[0][1], ranked[-1][1], "source/s0"}


@pytest.mark.longer
def test_whole_families_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "unused").mkdir()
    monkeypatch.chdir(tmp_path)
    sourced(TokenLoss(interval=1, source="origin", top=0, bottom=0, write_all=True), list("abcdef"))
    (line,) = (tmp_path / "unused" / TokenLoss.file_names("only")[0]).read_text().splitlines()
    assert {*json.loads(line)["source"]} == {*"abcdef"}


def test_missing_sources_are_reported():
    with pytest.warns(RunNotice, match="has no entry 'from', which token_loss.source names"):
        assert sourced(TokenLoss(interval=1, source="from"), list("abcdef")) == {}


def test_tags_of_another_length_are_refused():
    with pytest.raises(HookError, match="names 5 tags for 6 rows"):
        sourced(TokenLoss(interval=1, source="origin"), list("abcde"))


# Neutrality and precision


@pytest.mark.trainer
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("name", cases("mixtral", "vit"))
def test_run_has_the_bytes_of_the_bare_run(name):
    """The hook reads the logits of the training and changes no byte of it."""
    model, loss, batch = case(name)
    _, hooked = trained(model, [TokenLoss(interval=1)], loss, batch, batch)
    model, loss, batch = case(name)
    _, bare = trained(model, [], loss, batch, batch)
    assert not differences(without_on_demand(hooked.digest()), without_on_demand(bare.digest()))


@pytest.mark.longer
def test_bfloat16_autocast_is_measured_in_float32():
    """The loss of the pass is computed from the same bfloat16 logits, in float32."""
    model, _, batch = case("lstm")

    def in_autocast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return pair_loss(model, batch)

    try:
        in_autocast(model, batch)
    except RuntimeError as error:
        pytest.skip(f"this CPU has no LSTM in bfloat16: {str(error).splitlines()[0]}")
    found, _ = trained(model, [TokenLoss(interval=1)], in_autocast, batch)
    assert found[1]["unexplained"] == pytest.approx(0, abs=1e-4)


@pytest.mark.longer
def test_ignore_index_is_an_option():
    """Label 0 does not count."""
    model, _, (tokens, _) = case("lstm")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=0)

    found, _ = trained(model, [TokenLoss(interval=1, ignore_index=0)], loss, (tokens, tokens))
    assert found[1]["tokens"] == int((tokens != 0).sum())
    assert found[1]["unexplained"] == pytest.approx(0, abs=1e-5)


@pytest.mark.longer
def test_all_ignored_tokens_give_nan():
    model, _, (tokens, _) = case("lstm")
    found, _ = trained(
        model, [TokenLoss(interval=1)], lambda model, batch: 0 * model(batch[0]).sum(), (tokens, -tokens - 1)
    )
    assert math.isnan(found[1]["mean"])
    assert found[1]["tokens"] == 0


@pytest.mark.trainer
def test_targets_without_classes_are_reported():
    model, _, batch = case("llama")
    with pytest.warns(RunNotice, match="no labels were found; name the targets"):
        found, _ = trained(
            model,
            [TokenLoss(interval=1)],
            lambda model, batch: model(batch["input_ids"]).logits.square().mean(),
            {"input_ids": batch["input_ids"]},
        )
    assert found[1] == {}


@pytest.mark.parametrize(("option", "value"), [("interval", 0), ("shift", "x"), ("top", -1)])
def test_invalid_options_are_refused(option, value):
    with pytest.raises(UsageError, match=f"token_loss.{option} is {value!r}"):
        TokenLoss(**{option: value})


@pytest.mark.longer
def test_counts_are_remembered():
    """A resumed hook continues to count; the vocabulary is that of the logits."""
    hook = TokenLoss(interval=1)
    model, loss, batch = case("lstm")
    trained(model, [hook], loss, batch)
    counts = hook.state_dict()["counts"]
    assert counts.shape == (VOCABULARY,)
    assert int(counts.sum()) == int((batch[1] >= 0).sum())
    resumed = TokenLoss(interval=1)
    resumed.load_state_dict(hook.state_dict())
    trained(case("lstm")[0], [resumed], loss, batch)
    assert torch.equal(resumed.state_dict()["counts"], 2 * counts)
