"""Every registered hook on ranks that share rows, layers or both: equal metrics as one process, or a refusal."""

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
from loopscope.tensors import norm_of_each, trainable

from tests.support.cases import slow_unless
from tests.support.ranks import on_ranks
from tests.training_hooks.ranks.shared_runs import after_the_middle, build, refusal, resumed, trained
from tests.training_hooks.ranks.states import AS_ITS_PARAMETER, Results

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

assert training_hooks.__all__
DIFFERENCES = {"method": "finite_difference", "epsilon": 1e-3}
FEW = {"iterations": 2, "k": 1, "probes": 1, "density_probes": 1, "batches": 2, "critical_passes": 2}
SPLITS = Recipe("splits", metis=MetisOptions(rank=0.25, forward_warmup_steps=1, merge_steps=2))
REPLICATED, SHARDED, SPLIT = ("DDP",), ("FSDP2", "FSDP2 x TP", "HSDP"), ("TP", "FSDP2 x TP")


@dataclass(frozen=True)
class Subject:
    """A hook, with options for metrics within a few steps, and the kinds of runs that it refuses or cannot have."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    recipe: Recipe | None = None
    refused: tuple[str, ...] = ()
    """The kinds of runs in which the hook refuses to start."""
    remedy: str = ""
    """Pattern of the remedy in the refusal."""
    impossible: tuple[str, ...] = ()
    """The kinds of runs that cannot have such a model."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Pattern of the missing metrics by kind."""
    by_rank: bool = False
    """Whether it measures each rank's casts, with scales of its rows: equal on all ranks, but not to one process."""

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
    *(Subject(name, **ALONE) for name in ("batch_rows", "hypothesis_test", "step_history", "what_if")),
    Subject("attention", {"every": 1}, refused=SPLIT, remedy="in a run without tensor parallelism"),
    Subject("attention_logits", {"interval": 1}, refused=SPLIT, remedy="train without tensor parallelism"),
    Subject("qk_clip", {"threshold": 0.01}, refused=SPLIT, remedy="train without tensor parallelism"),
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
    Subject("hessian", {"burst_length": 2, "method": "exact"}, **EXACT),
    Subject("hessian", {"burst_length": 4, **DIFFERENCES}),
    Subject("loss_spikes", {"window": 2}),
    Subject("lr_probe", {"steps": 6, "smoothing": 0.5}),
    Subject("matrix_updates", {"interval": 1}),
    Subject("metis_split", recipe=SPLITS, refused=("DDP", *SHARDED), remedy="in one process", impossible=SPLIT),
    Subject("model_smoothing", {"update_interval": 2}),
    Subject("moe_router", {"routers": "blocks.*.down", "top_k": 2, "names": "*"}),
    Subject("optimizer_health", {"interval": 1}),
    Subject("output_projection_clip", {"window_size": 2}, tied=True, refused=SHARDED, remedy="DistributedDataParallel"),
    Subject("parameter_norms", {"interval": 1}),
    Subject("sharpness", FEW | {"method": "exact"}, **EXACT),
    Subject("sharpness", FEW | DIFFERENCES),
    Subject("subspace_gradient_info", {"window": 3, "top": 1}),
    Subject("variance", {"window": 2, "every": 2}),
    Subject("weight_average", {"interval": 1}, lacks=dict.fromkeys(SHARDED, "weight_average/(ema|swa)")),
]
RESUMED = ("FSDP2",)
"""The kinds of runs that are resumed from the middle."""
OF_A_RANK = re.compile("gradient_overflow/histories/(activations|output_gradients)/.*")
"""Remembered tensors that differ between ranks."""
OF_OWN_ROWS = re.compile(
    "training_checks/(duplicate_row_fraction|repeated_row_fraction|target_class_count|target_top|target_top_fraction"
    "|single_class_batch_fraction|rows/seen)"
)
"""Metrics and remembered tensors of the rows that a rank has itself."""
OF_WHOLE_ROWS = {"training_checks/dead_units_max"}
"""Metrics over the weights whose rows no rank divides, which are fewer where layers are split."""
SUBJECTS = CHOSEN + [
    Subject(hook.name) for hook in HookRegistry if hook.name not in {subject.name for subject in CHOSEN}
]


def runs() -> Iterator[list[Subject]]:
    """Yield the subjects of each run: hooks of one name in separate runs, and committing hooks alone."""
    rest = list(SUBJECTS)
    while rest:
        first = rest[0]
        alike = [item for item in rest if (item.tied, item.recipe) == (first.tied, first.recipe) and not item.commits]
        chosen = [first] if first.commits else list({item.name: item for item in reversed(alike)}.values())
        rest = [item for item in rest if item not in chosen]
        yield chosen


def supported(subjects: list[Subject], kind: str) -> list[Subject]:
    return [subject for subject in subjects if kind not in (*subject.refused, *subject.impossible)]


@cache
def measured(kind: str, *, audit: bool = False) -> Results:
    """Run all subjects in runs of a kind; an audit compares the bytes of the training state around every call."""
    results: Results = {"runs": {}, "bare": {}, "refusals": {}}
    bare: Results = {}
    for number, subjects in enumerate(runs()):
        model = {"tied": subjects[0].tied, "recipe": subjects[0].recipe}
        for subject in subjects:
            if kind in subject.refused and kind not in subject.impossible:
                results["refusals"][SUBJECTS.index(subject)] = refusal(kind, subject.make(), **model)
        if chosen := supported(subjects, kind):
            key = f"{model}"  # a recipe is not hashable
            bare[key] = results["bare"][number] = bare.get(key) or trained(kind, [], **model)["bytes"]
            hooks, resumes = [subject.make() for subject in chosen], kind in RESUMED
            run = results["runs"][number] = trained(kind, hooks, **model, audit=audit, keeps=resumes)
            if resumes:
                makers = {subject.name: subject.make for subject in chosen}
                run["resumed"] = resumed(kind, makers, run["middle"], **model)
    return results | {"reductions": 0 if kind == "one process" else reductions(kind)}


def reductions(kind: str) -> int:
    """Count the all-reduces for the norms of all parameters."""
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
    """Return a function from kind and number of ranks to the results of each rank."""

    @cache
    def of_group(kinds: tuple[str, ...], count: int) -> list[dict[str, Results]]:
        audit = count not in (3, 4)  # too slow for the groups that always run
        return on_ranks(partial(several, *kinds, audit=audit), tmp_path_factory.mktemp("ranks"), count)

    def of_kind(kind: str, count: int) -> list[Results]:
        kinds = next(group for group in TOGETHER if kind in group) if count in (3, 4) else (kind,)
        return [results[kind] for results in of_group(kinds, count)]

    return of_kind


MORE = [("DDP", 2), ("DDP", 4), ("FSDP2", 2), ("FSDP2", 4), ("TP", 2), ("FSDP2 x TP", 6), ("HSDP", 6)]
"""Six heads cannot be split into four parts."""
SIZES = [
    pytest.param(kinds, 4 if len(kinds) > 1 else 3, id=", ".join(kinds), marks=slow_unless(kinds == ("FSDP2",)))
    for kinds in TOGETHER
]
SIZES += [pytest.param((kind,), count, id=f"{kind}-{count}", marks=pytest.mark.slow) for kind, count in MORE]


def check_metrics_match_one_process(kind, count, of_ranks):
    expected = measured("one process")["runs"]
    for rank, result in enumerate(of_ranks(kind, count)):
        for number, subjects in enumerate(runs()):
            for subject in supported(subjects, kind):
                wanted = named(subject, expected[number]["metrics"], kind)
                metrics = named(subject, result["runs"][number]["metrics"], "")
                assert wanted, subject
                if subject.by_rank:
                    first = of_ranks(kind, count)[0]["runs"][number]["metrics"]
                    assert differing(metrics, named(subject, first, "")) == []
                    metrics, wanted = (dict(filter(is_of_rows, part.items())) for part in (metrics, wanted))
                    assert wanted, subject
                left_out = {key for key in (*metrics, *wanted) if kind in SPLIT and key[0] in OF_WHOLE_ROWS}
                assert {*differing(metrics, wanted)} <= left_out, (rank, subject)


def is_of_rows(item: Any) -> bool:
    """Return whether a metric counts elements that every rank has for its rows."""
    return "/total_elements_of/" in item[0][0] and "weight" not in item[0][0]


def named(subject: Subject, metrics: Mapping[Any, Any], kind: str) -> dict[Any, Any]:
    """Return the metrics of a subject's hook, without those that are missing in runs of a kind."""
    mine = {key: value for key, value in metrics.items() if key[0].startswith(subject.name + "/")}
    mine = {key: value for key, value in mine.items() if not OF_OWN_ROWS.fullmatch(key[0])}
    return {key: value for key, value in mine.items() if not re.fullmatch(subject.lacks.get(kind, ""), key[0])}


def differing(measured: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> list[Any]:
    return [key for key in {**measured, **wanted} if not equal(measured.get(key), wanted.get(key))]


def equal(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, (list, dict)):
        pairs = zip(value, wanted, strict=True) if isinstance(wanted, list) else ((value[k], wanted[k]) for k in wanted)
        return type(value) is type(wanted) and len(value) == len(wanted) and all(equal(*pair) for pair in pairs)
    if value is None or wanted is None:
        return value is wanted
    return (math.isnan(value) and math.isnan(wanted)) or value == pytest.approx(wanted, rel=1e-9, abs=1e-10)


def check_weights(kind, count, of_ranks):
    """Observers leave each rank's bytes unchanged; committing hooks give the weights of one process."""
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


def without_own_rows(remembered: Mapping[str, Any]) -> dict[str, Any]:
    return {path: content for path, content in remembered.items() if not OF_OWN_ROWS.fullmatch(path)}


def check_remembered_tensors(kind, count, of_ranks):
    """A remembered tensor has the layout of the parameter of its name, or is equal on all ranks."""
    first, *others = of_ranks(kind, count)
    alone = measured("one process")["runs"]
    for number, subjects in enumerate(runs()):
        names = {subject.name for subject in supported(subjects, kind)}
        remembered = without_own_rows(first["runs"][number]["remembered"]) if names else {}
        shapes = {
            path: shape
            for path, (shape, _) in without_own_rows(alone[number]["remembered"]).items()
            if path.split("/")[0] in names
        }
        assert {path: shape for path, (shape, _) in remembered.items()} == shapes
        differs: list[bool] = []  # two ranks may have the same largest element by chance
        for path, (_, content) in remembered.items():
            other_contents = [result["runs"][number]["remembered"][path][1] for result in others]
            if OF_A_RANK.fullmatch(path):
                differs.append(content not in other_contents)
            else:
                assert content == AS_ITS_PARAMETER or isinstance(content, int), path
                assert other_contents == [content] * (count - 1), path
        assert any(differs) or not differs


def check_resumed_metrics(kind, count, of_ranks):
    """Hooks resumed on equally many ranks and in one process report the metrics of the uninterrupted run."""
    for number, subjects in enumerate(runs()):
        run = of_ranks(kind, count)[0]["runs"].get(number)
        if run is None or "resumed" not in run:
            continue
        model = {"tied": subjects[0].tied, "recipe": subjects[0].recipe}
        comparable = [subject for subject in supported(subjects, kind) if not subject.by_rank]
        on_one = resumed("one process", {item.name: item.make for item in comparable}, run["middle"], **model)
        sharded = {path.split("/")[0] for path, (_, how) in run["remembered"].items() if how == AS_ITS_PARAMETER}
        assert sharded <= {key[0].split("/")[0] for key in on_one if key in run["resumed"]}
        for subject in comparable:
            for metrics in (named(subject, on_one, kind), named(subject, run["resumed"], kind)):
                wanted = named(subject, after_the_middle(run["metrics"]), kind) if metrics else {}
                assert differing(metrics, wanted) == [], subject


def check_refusals(kind, count, of_ranks):
    """An unsuitable hook raises on all ranks, with its name, the reason and a remedy."""
    first, *others = (result["refusals"] for result in of_ranks(kind, count))
    assert all(refusals == first for refusals in others)
    for number, sentence in first.items():
        subject = SUBJECTS[number]
        assert subject.name in sentence
        reasons = ("fully_shard", "tensor parallelism", "DistributedDataParallel", "one process")
        assert any(reason in sentence for reason in reasons)
        assert any(remedy in sentence for remedy in subject.remedy.split("|"))


def check_transfers(kind, count, of_ranks):
    """An observer transfers data to the host at most once per call.

    Attention gathers the samples of all ranks, and then ranks the heads by what they have together.
    """
    for result in of_ranks(kind, count):
        transfers = [item for run in result["runs"].values() for item in run["transfers"].items()]
        assert bool(transfers) == (kind == "DDP" or count not in (3, 4))
        assert [item for item in transfers if item[1] > 1 + (item[0] == "attention")] == []


def check_reductions(kind, count, of_ranks):
    """The norms of all parameters need one all-reduce per sharded mesh dimension."""
    dimensions = {"DDP": 0, "FSDP2 x TP": 2}.get(kind, 1)
    assert [result["reductions"] for result in of_ranks(kind, count)] == [dimensions] * count


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.parametrize(("kinds", "count"), SIZES)
def test_metrics_on_ranks_match_one_process(kinds, count, of_ranks):
    """All checks are one test, because every worker that takes a test starts its own group of processes."""
    for kind in kinds:
        check_metrics_match_one_process(kind, count, of_ranks)
        check_weights(kind, count, of_ranks)
        check_remembered_tensors(kind, count, of_ranks)
        check_resumed_metrics(kind, count, of_ranks)
        check_refusals(kind, count, of_ranks)
        check_transfers(kind, count, of_ranks)
        check_reductions(kind, count, of_ranks)
