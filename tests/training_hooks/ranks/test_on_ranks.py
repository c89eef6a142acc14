"""Every registered hook where ranks share the rows, the layers or both: it measures what one process measures, on every
rank, or it refuses to start, with one sentence."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed
from loopscope import training_hooks
from loopscope.hooks import EVERY_STEP, HookRegistry, InterventionHook, TrainingHook
from loopscope.lowbit import MetisOptions, Recipe, find_recipe
from loopscope.state import norm_of_each, trainable

from tests.support.cases import slow_unless
from tests.support.ranks import on_ranks
from tests.training_hooks.ranks.shared_runs import after_the_middle, build, gone_on, refusal, trained
from tests.training_hooks.ranks.states import AS_ITS_PARAMETER, Results

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

assert training_hooks.__all__
DIFFERENCES = {"method": "finite_difference", "epsilon": 1e-3}
FEW = {"iterations": 2, "k": 1, "probes": 1, "density_probes": 1, "batches": 2, "critical_passes": 2}
SPLITS = Recipe("splits", metis=MetisOptions(rank=0.25, forward_warmup_steps=1, merge_steps=2))
REPLICATED, SHARDED, SPLIT = ("DDP",), ("FSDP2", "FSDP2 x TP", "HSDP"), ("TP", "FSDP2 x TP")


@dataclass(frozen=True)
class Subject:
    """A hook, with options under which it has something to say in a few steps, and where it is told to be otherwise."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    recipe: Recipe | None = None
    refused: tuple[str, ...] = ()
    """The kinds under which the hook refuses to start."""
    remedy: str = ""
    """What the sentence says to do then."""
    impossible: tuple[str, ...] = ()
    """The kinds under which there is no such model."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """A pattern of the metrics that it leaves out under a kind."""
    by_rank: bool = False
    """What it measures are the ranks' own casts, each with scales for a part of the rows: equal on all ranks only."""

    def make(self) -> TrainingHook:
        hook = HookRegistry.get(self.name)(**self.options)
        if hook.step_schedule.mode == "stride" and hook.step_schedule.every_n_steps > 1:
            hook.step_schedule = EVERY_STEP
        return hook

    @property
    def commits(self) -> bool:
        kind = HookRegistry.get(self.name)
        return issubclass(kind, InterventionHook) and bool(kind.commits)


EXACT = {"refused": (*SHARDED, *SPLIT), "remedy": "method=finite_difference"}
ALONE = {"refused": (*REPLICATED, *SHARDED, *SPLIT), "remedy": "one process"}
CHOSEN = [
    *(Subject(name, **ALONE) for name in ("batch_rows", "step_history", "what_if")),
    Subject("attention", {"every": 1}, refused=SPLIT, remedy="in a run without it"),
    Subject("batch_dynamics", {"history": 4, "every": 5}),
    Subject("embedding_provenance", refused=(*SHARDED, *SPLIT), remedy="DistributedDataParallel|out of its plan"),
    Subject("embedding_provenance", tied=True, refused=SHARDED, remedy="DistributedDataParallel"),
    Subject("fourier", {"top_k": 2}, lacks=dict.fromkeys(SPLIT, "fourier/neuron_.*")),
    Subject("grad_clip", {"max_norm": 0.5}),
    Subject("grad_clip", {"method": "adagc", "warmup": 2}),
    Subject("grad_clip", {"method": "value", "max_value": 0.01}),
    Subject("grad_clip", {"method": "parameter", "max_norm": 0.1}),
    Subject("grad_clip", {"method": "zclip", "warmup": 2, "alpha": 0.5, "z_threshold": 0.5}),
    Subject("gradient_overflow", {"of": "gradients,weights"}),
    Subject(
        "gradient_overflow",
        {"of": "output_gradients,activations", "rules": "tensor,delayed"},
        refused=SPLIT,
        remedy="of=gradients,weights",
        by_rank=True,
    ),
    Subject("gradient_overflow", recipe=find_recipe("fp8"), impossible=SPLIT, by_rank=True),
    Subject("hessian", {"burst_length": 2}, **EXACT),
    Subject("hessian", {"burst_length": 4, **DIFFERENCES}),
    Subject("loss_spikes", {"window": 2}),
    Subject("lr_probe", {"steps": 6, "smoothing": 0.5}),
    Subject("metis_split", recipe=SPLITS, refused=("DDP", *SHARDED), remedy="by one process", impossible=SPLIT),
    Subject("model_smoothing", {"update_interval": 2}),
    Subject("output_projection_clip", {"window_size": 2}, tied=True, refused=SHARDED, remedy="DistributedDataParallel"),
    Subject("sharpness", FEW, **EXACT),
    Subject("sharpness", FEW | DIFFERENCES),
    Subject("subspace_gradient_info", {"window": 3, "top": 1}),
    Subject("variance", {"window": 2, "every": 2}),
    Subject("weight_average", {"interval": 1}, lacks=dict.fromkeys(SHARDED, "weight_average/(ema|swa)")),
]
GOES_ON = ("FSDP2",)
"""The kinds under which a run goes on from what hooks remember in its middle."""
OF_A_RANK = re.compile("gradient_overflow/histories/(activations|output_gradients)/.*")
"""Tensors that hooks remember of what each rank saw by itself."""
SUBJECTS = CHOSEN + [Subject(hook.name) for hook in HookRegistry if hook.name not in {each.name for each in CHOSEN}]


def runs() -> Iterator[list[Subject]]:
    """Yield the subjects that one run trains with: hooks of one name apart, those that commit alone."""
    rest = list(SUBJECTS)
    while rest:
        first = rest[0]
        alike = [each for each in rest if (each.tied, each.recipe) == (first.tied, first.recipe) and not each.commits]
        chosen = [first] if first.commits else list({each.name: each for each in reversed(alike)}.values())
        rest = [each for each in rest if each not in chosen]
        yield chosen


def supported(subjects: list[Subject], kind: str) -> list[Subject]:
    return [each for each in subjects if kind not in (*each.refused, *each.impossible)]


@cache
def measured(kind: str, *, audit: bool = False) -> Results:
    """Run everything under a kind, each byte of the training state compared around every call where it is an audit."""
    found: Results = {"runs": {}, "bare": {}, "refusals": {}}
    bare: Results = {}
    for number, subjects in enumerate(runs()):
        model = {"tied": subjects[0].tied, "recipe": subjects[0].recipe}
        for each in subjects:
            if kind in each.refused and kind not in each.impossible:
                found["refusals"][SUBJECTS.index(each)] = refusal(kind, each.make(), **model)
        if chosen := supported(subjects, kind):
            key = f"{model}"  # a recipe is no key
            bare[key] = found["bare"][number] = bare.get(key) or trained(kind, [], **model)["bytes"]
            hooks, goes_on = [each.make() for each in chosen], kind in GOES_ON
            run = found["runs"][number] = trained(kind, hooks, **model, audit=audit, keeps=goes_on)
            if goes_on:
                makers = {each.name: each.make for each in chosen}
                run["gone on"] = gone_on(kind, makers, run["middle"], **model)
    return found | {"reductions": 0 if kind == "one process" else reductions(kind)}


def reductions(kind: str) -> int:
    """Count the all-reduces that the norms of all parameters take."""
    from torch.distributed.tensor.debug import CommDebugMode

    task, _ = build(kind)
    with CommDebugMode() as collectives:
        norm_of_each(trainable(task.model))
    return collectives.get_total_counts()


def several(*kinds: str, audit: bool) -> dict[str, Results]:
    return {kind: measured(kind, audit=audit) for kind in kinds}


TOGETHER = [("DDP",), ("FSDP2",), ("TP",), ("FSDP2 x TP", "HSDP")]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """Return a function that returns what each of some ranks found under a kind."""

    @cache
    def of_group(kinds: tuple[str, ...], count: int) -> list[dict[str, Results]]:
        audit = count not in (3, 4)  # which are always on, and so have no time for it
        return on_ranks(partial(several, *kinds, audit=audit), tmp_path_factory.mktemp("ranks"), count)

    def of_kind(kind: str, count: int) -> list[Results]:
        kinds = next(each for each in TOGETHER if kind in each) if count in (3, 4) else (kind,)
        return [found[kind] for found in of_group(kinds, count)]

    return of_kind


MORE = [("DDP", 2), ("DDP", 4), ("FSDP2", 2), ("FSDP2", 4), ("TP", 2), ("FSDP2 x TP", 6), ("HSDP", 6)]
"""Six heads do not part into four."""
SIZES = [
    pytest.param(kinds, 4 if len(kinds) > 1 else 3, id=", ".join(kinds), marks=slow_unless(kinds == ("FSDP2",)))
    for kinds in TOGETHER
]
SIZES += [pytest.param((kind,), count, id=f"{kind}-{count}", marks=pytest.mark.slow) for kind, count in MORE]


def measures_what_one_process_measures(kind, count, of_ranks):
    expected = measured("one process")["runs"]
    for rank, result in enumerate(of_ranks(kind, count)):
        for number, subjects in enumerate(runs()):
            for subject in supported(subjects, kind):
                wanted = named(subject, expected[number]["metrics"], kind)
                found = named(subject, result["runs"][number]["metrics"], "")
                assert wanted, subject
                if subject.by_rank:
                    first = of_ranks(kind, count)[0]["runs"][number]["metrics"]
                    assert differing(found, named(subject, first, "")) == []
                    found, wanted = (dict(filter(is_of_rows, each.items())) for each in (found, wanted))
                    assert wanted, subject
                assert differing(found, wanted) == [], (rank, subject)


def is_of_rows(item: Any) -> bool:
    """Tell whether a metric counts elements of which every rank has its own."""
    return "/total_elements_of/" in item[0][0] and "weight" not in item[0][0]


def named(subject: Subject, metrics: Mapping[Any, Any], kind: str) -> dict[Any, Any]:
    """Return the metrics of a subject's hook, without those that it leaves out under a kind."""
    mine = {key: value for key, value in metrics.items() if key[0].startswith(subject.name + "/")}
    return {key: value for key, value in mine.items() if not re.fullmatch(subject.lacks.get(kind, ""), key[0])}


def differing(found: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> list[Any]:
    return [key for key in {**found, **wanted} if not equal(found.get(key), wanted.get(key))]


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, (list, dict)):
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, list) else ((found[k], wanted[k]) for k in wanted)
        return type(found) is type(wanted) and len(found) == len(wanted) and all(equal(*pair) for pair in pairs)
    both_nan = wanted is not None and found is not None and math.isnan(found) and math.isnan(wanted)
    return both_nan or (found is not None and found == pytest.approx(wanted, rel=1e-9, abs=1e-10))


def hooks_leave_every_rank_its_bytes_and_those_that_commit_the_weights_of_one_process(kind, count, of_ranks):
    expected = measured("one process")["runs"]
    for result in of_ranks(kind, count):
        for number, subjects in enumerate(runs()):
            run = result["runs"].get(number)
            if run is not None and subjects[0].commits:
                assert result["bare"][number] != run["bytes"]
                for name, weight in expected[number]["weights"].items():
                    torch.testing.assert_close(run["weights"][name], weight, rtol=1e-9, atol=1e-10)
            elif run is not None:
                assert result["bare"][number] == run["bytes"]


def what_a_hook_remembers_lies_as_the_parameter_of_its_name_or_is_the_same_on_all_ranks(kind, count, of_ranks):
    first, *others = of_ranks(kind, count)
    alone = measured("one process")["runs"]
    for number, subjects in enumerate(runs()):
        names = {subject.name for subject in supported(subjects, kind)}
        remembered = first["runs"][number]["remembered"] if names else {}
        shapes = {
            path: shape for path, (shape, _) in alone[number]["remembered"].items() if path.split("/")[0] in names
        }
        assert {path: shape for path, (shape, _) in remembered.items()} == shapes
        apart: list[bool] = []  # two shares of the rows may have the same largest element
        for path, (_, how) in remembered.items():
            elsewhere = [each["runs"][number]["remembered"][path][1] for each in others]
            if OF_A_RANK.fullmatch(path):
                apart.append(how not in elsewhere)
            else:
                assert how == AS_ITS_PARAMETER or isinstance(how, int), path
                assert elsewhere == [how] * (count - 1), path
        assert any(apart) or not apart


def hooks_go_on_from_what_they_remembered_on_as_many_ranks_and_in_one_process(kind, count, of_ranks):
    for number, subjects in enumerate(runs()):
        run = of_ranks(kind, count)[0]["runs"].get(number)
        if run is None or "gone on" not in run:
            continue
        model = {"tied": subjects[0].tied, "recipe": subjects[0].recipe}
        comparable = [each for each in supported(subjects, kind) if not each.by_rank]
        on_one = gone_on("one process", {each.name: each.make for each in comparable}, run["middle"], **model)
        cut_up = {path.split("/")[0] for path, (_, how) in run["remembered"].items() if how == AS_ITS_PARAMETER}
        assert cut_up <= {key[0].split("/")[0] for key in on_one if key in run["gone on"]}
        for subject in comparable:
            for found in (named(subject, on_one, kind), named(subject, run["gone on"], kind)):
                wanted = named(subject, after_the_middle(run["metrics"]), kind) if found else {}
                assert differing(found, wanted) == [], subject


def a_hook_that_does_not_suit_says_on_all_ranks_which_one_why_and_what_to_do(kind, count, of_ranks):
    first, *others = (result["refusals"] for result in of_ranks(kind, count))
    assert all(each == first for each in others)
    for number, sentence in first.items():
        subject = SUBJECTS[number]
        assert subject.name in sentence
        reasons = ("fully_shard", "tensor parallelism", "DistributedDataParallel", "one process")
        assert any(reason in sentence for reason in reasons)
        assert any(remedy in sentence for remedy in subject.remedy.split("|"))


def a_call_of_an_observer_reads_from_the_device_at_most_once(kind, count, of_ranks):
    for result in of_ranks(kind, count):
        transfers = [item for run in result["runs"].values() for item in run["transfers"].items()]
        assert bool(transfers) == (kind == "DDP" or count not in (3, 4))
        assert [item for item in transfers if item[1] > 1] == []


def the_norms_of_all_parameters_take_one_reduction_for_each_dimension_that_they_are_sharded_over(kind, count, of_ranks):
    dimensions = {"DDP": 0, "FSDP2 x TP": 2}.get(kind, 1)
    assert [result["reductions"] for result in of_ranks(kind, count)] == [dimensions] * count


@pytest.mark.parametrize(("kinds", "count"), SIZES)
def test_every_rank_measures_what_one_process_measures(kinds, count, of_ranks):
    """One test for all of it, since the processes of a group are made once for each test that another worker takes."""
    for kind in kinds:
        measures_what_one_process_measures(kind, count, of_ranks)
        hooks_leave_every_rank_its_bytes_and_those_that_commit_the_weights_of_one_process(kind, count, of_ranks)
        what_a_hook_remembers_lies_as_the_parameter_of_its_name_or_is_the_same_on_all_ranks(kind, count, of_ranks)
        hooks_go_on_from_what_they_remembered_on_as_many_ranks_and_in_one_process(kind, count, of_ranks)
        a_hook_that_does_not_suit_says_on_all_ranks_which_one_why_and_what_to_do(kind, count, of_ranks)
        a_call_of_an_observer_reads_from_the_device_at_most_once(kind, count, of_ranks)
        the_norms_of_all_parameters_take_one_reduction_for_each_dimension_that_they_are_sharded_over(
            kind, count, of_ranks
        )
