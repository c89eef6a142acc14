"""Registries: checks of classes, hooks of installed packages, and selections."""

import signal
import subprocess
import sys

import pytest
from loopscope import training_hooks
from loopscope.errors import UsageError
from loopscope.hooks import (
    DebugInterventionHook,
    HookPoint,
    HookRegistry,
    InterventionHook,
    StatePart,
    TrainingHook,
    hook_options,
)
from loopscope.hooks.class_checks import check_hook_class
from loopscope.hooks.selection import bulk_hooks, hook_kind, select_hooks
from loopscope.registry import Registry

assert training_hooks.__all__
HookRegistry.discover()  # before any test puts a package on the path, since discovery happens once


class Watcher(TrainingHook):
    """A valid observer."""

    name = "watcher"
    hook_points = frozenset({HookPoint.POST_EPOCH})

    def compute(self, ctx):
        return {}

    def describe_metrics(self):
        return []


class Meddler(InterventionHook):
    """A valid intervention."""

    name = "meddler"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_STEP})

    def intervene(self, run_ctx, model_ctx):
        return {}

    def describe_metrics(self):
        return []


class Debugger(DebugInterventionHook, Meddler):
    """A debug intervention."""

    name = "debugger"


def variant(base: type[TrainingHook], name: str, **attributes) -> type[TrainingHook]:
    return type(name.title(), (base,), {"name": name, **attributes})


def registry() -> Registry:
    return Registry("hook", "loopscope.hooks", check_hook_class)


@pytest.fixture
def registered():
    """Add hooks to the global registry for one test."""
    added: list[str] = []

    def add(*hooks: type[TrainingHook]) -> None:
        for hook in hooks:
            HookRegistry.register(hook)
            added.append(hook.name)

    yield add
    for name in added:
        HookRegistry.unregister(name)


def test_duplicate_class_name_is_refused():
    """The error names both classes, and the first one stays registered."""
    hooks = registry()
    hooks.register(Watcher)
    with pytest.raises(UsageError, match=r"Two hooks are named 'watcher': .*Watcher and .*Impostor"):
        hooks.register(type("Impostor", (Watcher,), {}))
    assert hooks.get("watcher") is Watcher


def test_same_class_can_be_registered_twice():
    hooks = registry()
    assert hooks.register(hooks.register(Watcher)) is Watcher


def test_unregistered_class_is_removed():
    hooks = registry()
    hooks.register(Watcher)
    hooks.unregister("watcher")
    assert hooks.names() == []


def init(signature: str):
    """Return a constructor with these parameters."""
    scope: dict = {}
    exec(f"def __init__(self, {signature}): pass", scope)
    return scope["__init__"]


@pytest.mark.parametrize(
    ("hook", "sentence"),
    [
        (lambda: variant(Watcher, "two words"), "needs a name of letters, digits and underscores"),
        (lambda: variant(Watcher, ""), "needs a name of letters, digits and underscores"),
        (lambda: variant(Watcher, "w", hook_points=frozenset()), "fires nowhere; set hook_points"),
        (lambda: variant(Watcher, "w", hook_points={"POST_EPOCH"}), "Unknown hook point 'POST_EPOCH'"),
        (lambda: variant(Watcher, "w", loop_points={"epoc": {HookPoint.POST_EPOCH}}), "Did you mean 'epoch'"),
        (lambda: variant(Watcher, "w", loop_points={"step": {3}}), "Unknown hook point 3"),
        (lambda: variant(Watcher, "w", __init__=init("k: int = 1")), "takes 'k'; an option must be keyword-only"),
        (lambda: variant(Watcher, "w", __init__=init("*, k: int")), "takes 'k'; .* have a default"),
        (lambda: variant(Watcher, "w", __init__=init("*, k=1")), "takes 'k'; .* annotated"),
        (lambda: variant(Watcher, "w", __init__=init("**options: int")), "takes 'options'"),
        (lambda: type("Lazy", (TrainingHook,), {"name": "lazy"}), r"must define compute\(\), describe_metrics\(\)"),
        (
            lambda: type("Terse", (TrainingHook,), {"name": "terse", "compute": Watcher.compute, "metrics": "a | b"}),
            "The metric row 'a . b' is invalid; write 'name",
        ),
        (
            lambda: type("Idle", (InterventionHook,), {"name": "idle"}),
            r"must define describe_metrics\(\), intervene\(\)",
        ),
        (lambda: variant(Meddler, "m", hook_points={HookPoint.PRE_UPDATE}), "PRE_UPDATE, which is for observers"),
        (lambda: variant(Meddler, "m", intervention_points={HookPoint.SNAPSHOT}), "SNAPSHOT, which is not among its"),
        (lambda: variant(Meddler, "m", commits={"gradients"}), "commits 'gradients'; .*StatePart.GRADIENTS"),
        (lambda: print, "is not a subclass of TrainingHook"),
    ],
)
def test_invalid_hook_class_is_refused(hook, sentence):
    """Wrong names, points, options and missing methods each raise a UsageError with the reason."""
    hooks = registry()
    with pytest.raises(UsageError, match=sentence):
        hooks.register(hook())
    assert hooks.names() == []


def test_loop_points_alone_are_enough():
    points = {"epoch": {HookPoint.POST_EPOCH: (0, 5)}, "step": {HookPoint.POST_STEP}}
    hook = variant(Watcher, "w", hook_points=frozenset(), loop_points=points)
    assert registry().register(hook) is hook


def test_intervention_may_observe_pre_update():
    """PRE_UPDATE is allowed for an intervention hook that only observes there."""
    hook = variant(
        Meddler,
        "m",
        hook_points={HookPoint.PRE_UPDATE, HookPoint.POST_STEP},
        intervention_points={HookPoint.POST_STEP},
        compute=lambda self, ctx: {},
    )
    assert registry().register(hook) is hook


def test_options_are_the_keyword_only_arguments():
    hook = variant(Watcher, "w", __init__=init("*, top_k: int = 5, scale: float = 0.5"))
    assert {name: option.default for name, option in hook_options(hook).items()} == {"top_k": 5, "scale": 0.5}


def test_unknown_name_suggests_nearest_one():
    """The error also lists the known hooks."""
    hooks = registry()
    hooks.register(Watcher)
    hooks.register(Meddler)
    with pytest.raises(
        UsageError, match=r"Unknown hook 'whatcher'. Did you mean 'watcher'\? Known: meddler, watcher\."
    ):
        hooks.get("whatcher")


PLUGIN = """
from loopscope.hooks.hook_points import HookPoint
from loopscope.hooks.base import TrainingHook

class Plugin(TrainingHook):
    '''A hook of another package.'''
    name = {name!r}
    hook_points = frozenset({{HookPoint.POST_EPOCH}})
    made = 0
    def __init__(self):
        type(self).made += 1
    def compute(self, ctx):
        return {{}}
    def describe_metrics(self):
        return []
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put packages with one hook each on the path, as pip would."""

    def put(module: str, source: str, name: str = "plugged") -> None:
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[loopscope.hooks]\n{name} = {module}:Plugin\n")
        (tmp_path / f"{module}.py").write_text(source)

    monkeypatch.syspath_prepend(tmp_path)
    return put


def test_plugin_hooks_are_discovered_but_not_selected(install):
    """Hooks of installed packages are listed, but a group does not select them."""
    install("plugin_one", PLUGIN.format(name="plugged"))
    hooks = registry()
    assert "plugged" in hooks.names()
    assert hooks.get("plugged").made == 0
    assert "plugged" not in select_hooks("minimal", [], {"minimal": ["training_metrics"]}, "any")


def test_unimportable_plugin_warns_and_is_refused(install):
    """A plugin with a failing import causes a warning and is refused only when its hook is requested."""
    install("plugin_two", "import no_such_package_anywhere")
    hooks = registry()
    hooks.register(Watcher)
    with pytest.warns(UserWarning, match=r"hook 'plugged' of plugin_two:Plugin cannot be used\. ModuleNotFoundError"):
        assert hooks.names() == ["watcher"]
    with pytest.raises(
        UsageError, match=r"anywhere' \[plugin_two\.py:1 in <module>: import no_such_package_anywhere\]"
    ):
        hooks.get("plugged")


def test_plugin_syntax_error_shows_its_line(install):
    """The warning contains the file and line of the syntax error."""
    install("plugin_typo", "\nimport")
    with pytest.warns(UserWarning, match=r"plugin_typo:Plugin cannot be used\. SyntaxError: .*plugin_typo\.py, line 2"):
        registry().discover()


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("source", ["import sys; sys.exit()", "raise SystemExit('x')"])
def test_exiting_plugin_is_excluded_with_warning(install, source):
    """A plugin whose import raises SystemExit is named and refused on request."""
    module = f"plugin_ending_{abs(hash(source))}"
    install(module, source)
    hooks = registry()
    hooks.register(Watcher)
    with pytest.warns(UserWarning, match=f"hook 'plugged' of {module}:Plugin cannot be used. SystemExit"):
        assert hooks.names() == ["watcher"]
    with pytest.raises(UsageError, match="cannot be used"):
        hooks.get("plugged")


@pytest.mark.guarantee("mistakes-are-refused-early")
def test_interrupt_during_plugin_import_propagates(install):
    """A SIGINT from the user raises KeyboardInterrupt, and the signal handler is unchanged."""
    install("plugin_pressed", "import signal; signal.raise_signal(signal.SIGINT)")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            registry().discover()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_malformed_plugin_hook_is_refused(install):
    """The warning and the error contain the reason."""
    install("plugin_three", PLUGIN.format(name="plugged").replace("HookPoint.POST_EPOCH", "'POST_EPOCH'"))
    hooks = registry()
    with pytest.warns(UserWarning, match="Unknown hook point 'POST_EPOCH'"):
        hooks.discover()
    with pytest.raises(UsageError, match="Unknown hook point 'POST_EPOCH'"):
        hooks.get("plugged")


def test_plugin_with_taken_name_always_fails(install):
    """Every attempt to list the names raises the same UsageError."""
    install("plugin_four", PLUGIN.format(name="watcher"))
    hooks = registry()
    hooks.register(Watcher)
    for _ in range(2):
        with pytest.raises(UsageError, match="Two hooks are named 'watcher'"):
            hooks.names()


@pytest.fixture
def four_kinds(registered):
    registered(
        Watcher, Meddler, Debugger, variant(Meddler, "committer", commits={StatePart.GRADIENTS}),
        variant(Debugger, "debug_committer", commits={StatePart.GRADIENTS}),
    )  # fmt: skip


@pytest.mark.usefixtures("four_kinds")
def test_every_hook_has_one_kind():
    names = ("watcher", "meddler", "debugger", "committer", "debug_committer")
    kinds = {name: hook_kind(HookRegistry.get(name)) for name in names}
    assert list(kinds.values()) == ["observer", "intervention", "debug", "committing", "debug"]


@pytest.mark.guarantee("commits-are-declared")
@pytest.mark.usefixtures("four_kinds")
@pytest.mark.parametrize("keyword", ["all", "full", "observers", "interventions"])
def test_bulk_selections_exclude_debug_and_committing_hooks(keyword):
    """A hook that changes the run is enabled only by its own name, never by a group or a keyword."""
    kinds = {hook_kind(HookRegistry.get(name)) for name in bulk_hooks(keyword)}
    expected = {"observers": {"observer"}, "interventions": {"intervention"}}
    assert kinds == expected.get(keyword, {"observer", "intervention"})
    assert not {"debugger", "committer"} & set(bulk_hooks(keyword))


@pytest.mark.usefixtures("four_kinds")
def test_selection_keywords_expand_in_place():
    """Each hook occurs once, and training_metrics comes first."""
    selected = select_hooks(None, ["meddler", "observers", "meddler", "watcher"], {}, "any")
    assert selected[:2] == ["training_metrics", "meddler"]
    assert sorted(selected) == sorted({*bulk_hooks("observers"), "meddler"})
    assert select_hooks(None, ["all"], {}, "any")[0] == "training_metrics"


@pytest.mark.usefixtures("four_kinds")
def test_with_debug_adds_observers_and_debug_hooks():
    """The keyword with_debug selects no committing hook."""
    selected = select_hooks(None, ["with_debug"], {}, "any")
    assert {"training_metrics", "debugger"} <= set(selected)
    assert {hook_kind(HookRegistry.get(name)) for name in selected} == {"observer", "debug"}


@pytest.mark.usefixtures("four_kinds")
def test_committing_and_debug_hooks_selectable_by_name():
    """Hooks of these kinds run when they are named explicitly."""
    named = ["debug_committer", "committer", "debugger"]
    assert select_hooks(None, named, {}, "any") == ["training_metrics", *named]


@pytest.mark.guarantee("commits-are-declared")
@pytest.mark.usefixtures("four_kinds")
@pytest.mark.parametrize(("name", "kind"), [("committer", "committing"), ("debugger", "debug")])
def test_group_with_committing_hook_is_refused(name, kind):
    """A group must not contain committing or debug hooks."""
    with pytest.raises(UsageError, match=f"Group 'mine' of experiment 'own' contains the {kind} hook '{name}'"):
        select_hooks("mine", [], {"mine": ["watcher", name]}, "own")


@pytest.mark.usefixtures("four_kinds")
def test_group_and_names_are_combined():
    """The order is training_metrics, then the group, then the named hooks."""
    assert select_hooks("mine", ["meddler"], {"mine": ["watcher"]}, "own") == ["training_metrics", "watcher", "meddler"]
    assert select_hooks("none", [], {"none": []}, "own") == []
    assert select_hooks(None, [], {}, "own") == []


def test_group_name_among_hooks_is_refused():
    """The error suggests --with-hooks."""
    with pytest.raises(UsageError, match=r"'minimal' is a group of hooks, not a hook; use with_hooks='minimal'\."):
        select_hooks(None, ["minimal"], {"minimal": ["training_metrics"]}, "own")


@pytest.mark.usefixtures("four_kinds")
@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ("watcher", r"'watcher' is a hook, not a group of hooks; use hooks=\['watcher'\]\."),
        ("watcher,meddler", r"'watcher,meddler' names hooks, not .*; use hooks=\['watcher', 'meddler'\]\."),
    ],
)
def test_hooks_given_as_a_group_are_refused(group, problem):
    with pytest.raises(UsageError, match=problem):
        select_hooks(group, [], {"none": []}, "own")


def test_unknown_group_lists_known_groups():
    """The error names the experiment and suggests the nearest group."""
    with pytest.raises(UsageError, match=r"'own' has no hook group .*Did you mean 'minimal'\? Known: minimal, none"):
        select_hooks("minmal", [], {"none": [], "minimal": []}, "own")


@pytest.mark.parametrize(
    ("name", "nearest"), [("norm", "norms"), ("obsrvers", "observers"), ("with_debg", "with_debug")]
)
def test_unknown_hook_or_keyword_suggests_nearest(name, nearest):
    with pytest.raises(UsageError, match=f"Unknown hook '{name}'. Did you mean '{nearest}'"):
        select_hooks(None, [name], {}, "any")


CELL = """
from loopscope import HookPoint, HookRegistry, TrainingHook

@HookRegistry.register
class Again(TrainingHook):
    name = "again"
    hook_points = {{HookPoint.POST_STEP}}
    metrics = "value | {value} | [0, 1] | A constant."

    def compute(self, ctx):
        return {{"value": {value}}}
"""


@pytest.mark.slow
@pytest.mark.process
def test_rerun_cell_replaces_its_hook(tmp_path):
    """Code without a file may define a hook again, while a script with two equal names is refused."""
    last = "assert HookRegistry.get('again').metrics.startswith('value | 2')"
    twice = CELL.format(value=1) + CELL.format(value=2) + last
    assert subprocess.run([sys.executable, "-c", twice], check=False).returncode == 0
    (tmp_path / "script.py").write_text(twice)
    process = subprocess.run([sys.executable, str(tmp_path / "script.py")], check=False, capture_output=True, text=True)
    assert "Two hooks are named 'again'" in process.stderr
