"""The oracle reports every kind of difference, and never uses the current code as its own reference."""

import doctest
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from tests.oracle import __main__ as oracle
from tests.oracle import compare, digests, environment, hook_cases, product, recording, storage, trees, worker
from tests.oracle.digests import digest, digest_of_values

EPOCH, STEP = "norms/epoch", "norms/step"
RECORD = {
    EPOCH: {
        "facts": {"norms/total": [4, 4, 16], "norms/ratio": [4, 4, 16]},
        "digests": {"norms/total": "aa", "norms/ratio": "bb", "weights": "cc", "generators": "dd"},
    },
    STEP: {"facts": {"refused": "UsageError"}, "digests": {}},
}
HELP = {"loopscope --help": ["usage: loopscope COMMAND ...", "  resume RUN   resume a run"]}


def planted(change):
    """Return the report after ``change`` was made to a copy of the record."""
    now = deepcopy(RECORD)
    change(now)
    return "\n".join(compare.report(compare.differences("hooks", RECORD, now)))


PLANTED = {
    "formula": (lambda now: now[EPOCH]["digests"].update({"norms/ratio": "xx"}), "other values: norms/ratio"),
    "draw": (
        lambda now: now[EPOCH]["digests"].update(generators="xx", weights="xx"),
        "another final state: weights, generators",
    ),
    "metric gone": (lambda now: now[EPOCH]["facts"].pop("norms/total"), "metrics missing: norms/total"),
    "new metric": (lambda now: now[EPOCH]["facts"].update({"norms/max": [1, 4, 4]}), "new metrics: norms/max"),
    "steps": (
        lambda now: now[EPOCH]["facts"].update({"norms/total": [4, 3, 16]}),
        "other number of values, first or last step (first of them [4, 4, 16], now [4, 3, 16]): norms/total",
    ),
    "refused": (lambda now: now[EPOCH].update(facts={"refused": "HookError"}, digests={}), "trains, now HookError"),
    "refused no more": (lambda now: now[STEP].update(facts={}), "refused (UsageError), now trains"),
    "other refusal": (
        lambda now: now[STEP]["facts"].update(refused="HookError"),
        "refused (UsageError), now HookError",
    ),
    "case gone": (lambda now: now.pop(STEP), "norms/step: no longer recorded"),
    "new hook": (lambda now: now.update({"new/epoch": now[STEP]}), "new/epoch: new, and not stored"),
}


@pytest.mark.parametrize(("change", "sentence"), PLANTED.values(), ids=PLANTED)
def test_planted_differences_are_reported(change, sentence):
    assert sentence in planted(change)


def test_equal_records_report_nothing():
    assert planted(lambda now: None) == ""
    assert compare.differences("help", HELP, deepcopy(HELP)) == []


def test_changed_help_lines_are_reported():
    now = {"loopscope --help": [HELP["loopscope --help"][0], "  resume RUN   continue a run"], "loopscope more": []}
    (lines,) = ["\n".join(compare.report(compare.differences("help", HELP, now)))]
    assert "-  resume RUN   resume a run\n+  resume RUN   continue a run" in lines
    assert "loopscope more: new, and not stored" in lines


def test_missing_digests_leave_facts_compared():
    stored, now = deepcopy(RECORD), deepcopy(RECORD)
    stored[EPOCH]["digests"], now[EPOCH]["digests"] = None, {"norms/total": "xx"}
    assert compare.differences("hooks", stored, now) == []
    del now[EPOCH]["facts"]["norms/total"]
    assert len(compare.differences("hooks", stored, now)) == 1


def test_reports_group_cases_and_are_capped():
    many = [compare.Difference("hooks", f"hook_{case}/epoch", "new, and not stored") for case in range(9)]
    (line,) = compare.report(many)
    assert line.count("/epoch") == compare.MOST_NAMES
    assert "and 5 more" in line
    assert len(compare.report([compare.Difference("hooks", "a", str(what)) for what in range(99)])) <= 41


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        ({"a": 1}, {"a": True}),
        ([1, [2]], [[1], 2]),
    ],
)
def test_digests_distinguish_values(one, other):
    assert digest(one) == digest(deepcopy(one)) != digest(other)


def test_series_digests_distinguish_steps_and_bits():
    series = [(1, 0.1), (2, float("nan"))]
    assert digest_of_values(series) == digest_of_values(list(series))
    assert len({digest_of_values(pairs) for pairs in (series, [(1, 0.1), (3, float("nan"))], [(1, 0.1 + 2e-17)])}) == 3


def test_every_shipped_hook_has_every_case():
    product.discover()
    covered = {name.split("/")[0].split(".")[0] for name in hook_cases.names()}
    assert covered == {*product.shipped_hooks()}
    assert len(hook_cases.names()) == len(hook_cases.CASES) * len(hook_cases.variants())


@pytest.mark.slow
def test_cases_do_not_depend_on_earlier_cases():
    """The first case of a process is discarded, as in a worker: its imports may draw random numbers."""
    product.discover()
    found = []
    for name in ("training_metrics", "sharpness", "what_if", "sharpness"):
        with recording.isolated_case():
            found.append(hook_cases.record(f"{name}/attach"))
    assert found[1] == found[3]
    assert found[1]["facts"]["sharpness/trace"]


@pytest.mark.parametrize("module", [compare, digests, product, storage], ids=lambda module: module.__name__)
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(module) == (0, 1)


# Storage and reference


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository whose second commit stores a reference and whose third changes the code."""
    monkeypatch.setattr(environment, "name_of", lambda part: "here")
    repository = tmp_path / "repository"
    repository.mkdir()
    for words in (("init", "-q"), ("config", "user.name", "a"), ("config", "user.email", "a@b")):
        trees.git(repository, *words)
    for code in ("old", "reference", "present"):
        (repository / "code").write_text(code)
        if code == "reference":
            storage.Storage(repository).update({"hooks": RECORD}, dict.fromkeys(oracle.PARTS, "there"))
        trees.git(repository, "add", "-A")
        trees.git(repository, "commit", "-q", "-m", code)
    return repository


@pytest.fixture
def recorded(monkeypatch):
    """Replace the recording by values from the tree's code; return the list of recordings."""
    codes = []

    def record_of(tree, parts):
        codes.append((tree / "code").read_text())
        now = deepcopy(RECORD)
        now[EPOCH]["digests"]["norms/total"] = codes[-1]
        return dict.fromkeys(parts, now)

    monkeypatch.setattr(trees, "record_of", record_of)
    return codes


@pytest.mark.process
def test_unknown_environments_record_the_reference_commit(tree, recorded, capsys):
    assert oracle.compared(tree, ["hooks"]) == 1
    assert recorded == ["reference", "present"]
    assert capsys.readouterr().out == "hooks: norms/epoch: other values: norms/total\n"
    assert oracle.compared(tree, ["hooks"]) == 1  # reporting a difference does not accept it
    assert recorded[2:] == ["present"]
    assert "reference" in next((tree / storage.FOLDER / "here").iterdir()).read_text()
    assert trees.git(tree, "worktree", "list").count("\n") == 0


@pytest.mark.process
def test_missing_reference_commit_is_reported(tree, recorded):
    trees.git(tree, "rm", "-q", "--cached", str(storage.REFERENCE))
    with pytest.raises(trees.NoReferenceError, match="has uncommitted changes"):
        oracle.compared(tree, ["hooks"])
    trees.git(tree, "checkout", "-q", "--orphan", "empty")
    with pytest.raises(trees.NoReferenceError, match="git log failed"):
        oracle.compared(tree, ["hooks"])
    assert recorded == []


@pytest.mark.process
def test_shallow_clones_without_the_reference_are_refused(tree, recorded, tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{tree}", str(clone)], check=True)
    with pytest.raises(trees.NoReferenceError, match="run git fetch --unshallow"):
        oracle.compared(clone, ["hooks"])
    assert recorded == []


@pytest.mark.process
def test_updates_drop_digests_of_other_environments(tree, recorded):
    oracle.compared(tree, ["hooks"])
    trees.git(tree, "add", "-A")
    trees.git(tree, "commit", "-q", "-m", "another environment")
    assert oracle.update(tree, ["hooks"]) == 0
    assert {file.parent.name for file in (tree / storage.FOLDER).glob("*/*.json")} == {"here"}
    assert oracle.compared(tree, ["hooks"]) == 0
    reference = storage.Storage(tree).reference()
    assert oracle.update(tree, ["hooks"]) == 0
    assert storage.Storage(tree).reference() == reference


@pytest.mark.process
def test_updates_need_committed_code(tree, recorded):
    (tree / "code").write_text("not committed")
    with pytest.raises(trees.NoReferenceError, match="code is not committed"):
        oracle.update(tree, ["hooks"])
    assert recorded == []


@pytest.mark.process
def test_facts_are_stored_by_environment(tree):
    kept = storage.Storage(tree)
    here = deepcopy(RECORD)
    here[EPOCH]["facts"]["alert/norms"] = [1, 4, 4]
    kept.add_environment({"hooks": here}, {"hooks": "here"})
    assert kept.record("hooks", "here") == here
    assert kept.record("hooks", "there") == RECORD


def test_packages_are_linked_from_their_tree(tmp_path):
    tree = Path(__file__).parents[2]
    trees.link_package(tree, tmp_path)
    for package in ("", "training_hooks", "sinks", "experiments"):
        linked = (tmp_path / "loopscope" / package / "__init__.py").resolve()
        assert linked == tree / (package or "framework") / "__init__.py"


def test_package_of_another_tree_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="but loopscope is imported from"):
        worker.check_tree(tmp_path)
