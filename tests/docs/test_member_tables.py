"""The tables of class members and of the model context's methods are complete."""

import inspect
import re

from loopscope.hooks import InterventionHook, ModelDataContext
from loopscope.runs import ExperimentRunner

from tests.docs.markdown import ROOT, code, prose, table_with

HOOK_PAGE = ROOT / "docs/writing-a-hook.md"
EXPERIMENT_PAGE = ROOT / "docs/writing-an-experiment.md"


def members(described: type) -> set[str]:
    """Return the public names that a class and its bases in the framework define or annotate."""
    bases = [base for base in inspect.getmro(described) if base.__module__.startswith("loopscope.")]
    return {name for base in bases for name in (*vars(base), *inspect.get_annotations(base)) if name[0] != "_"}


def names(text: str) -> set[str]:
    return {name.partition("(")[0] for name in code(text) if re.fullmatch(r"\w+(\(.*\))?", name)}


def test_the_table_of_a_hook_has_every_member() -> None:
    listed = {name for row in table_with(HOOK_PAGE, "member", "default") for name in names(row["member"])}
    assert listed == members(InterventionHook) - {"intervenes_at", "debug"}


def test_hook_page_lists_every_context_method() -> None:
    """The page on hooks mentions every public method of ModelDataContext."""
    assert members(ModelDataContext) - {"loader", "model", "device", "optimizer_state"} <= names(prose(HOOK_PAGE))


def test_experiment_page_lists_every_runner_member() -> None:
    """The page on experiments mentions every public member of ExperimentRunner."""
    assert members(ExperimentRunner) - {"config", "device"} <= names(prose(EXPERIMENT_PAGE))
