"""Contract of every registered sink."""

import inspect
import json
import re

import pytest
from loopscope import sinks as shipped  # noqa: F401 - fills the registry
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import Alert, HookPoint, MetricSink, Series, SinkRegistry
from loopscope.hooks.registries import check_sink_class
from loopscope.loops import epoch_loop, step_loop
from loopscope.registry import Registry
from loopscope.state import without_on_demand

from tests.sinks.emits import disable_clients, run_info
from tests.sinks.event_files import lines
from tests.support import Case, RecordingSink, SpyHook, build, differences

pytestmark = pytest.mark.parametrize("sink_class", list(SinkRegistry), ids=lambda sink: sink.name)
LOOPS = {"epoch": epoch_loop, "step": step_loop}


@pytest.fixture(autouse=True)
def no_clients(monkeypatch, sink_class):
    """Disable clients, which take seconds to start; tests/sinks/test_wandb_sink.py and its siblings cover them."""
    try:
        sink_class.check_installed()
    except UsageError as error:
        pytest.skip(str(error))
    disable_clients(monkeypatch)


def files(folder):
    """Return the texts of all files in a folder; event files as lines of scalars."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [lines(path) if "tfevents" in path.name else path.read_text() for path in paths]


def produced(folder, capsys):
    """Return the complete output of a sink, in files and on the console."""
    return "".join(files(folder)) + capsys.readouterr().out


def show(sink, metrics, step, point=HookPoint.POST_EPOCH):
    sink.emit(metrics, step, point, step=step)
    sink.snapshot(step, step)


def run_with(folder, sinks, loop="epoch", **options):
    """Run a loop of six steps with a hook that reports at every hook point, and return its final state digest."""
    task, state = build(Case(loop=loop), steps=6)
    hook = SpyHook(lambda ctx: {"step": ctx.step, "loss": ctx.loss if ctx.loss is not None else float("nan")})
    manager = HookManager([hook] if sinks else [], task, state, loop=loop, sinks=sinks, **options)
    manager.start(run_info(folder, loop=loop))
    LOOPS[loop](task, manager)
    manager.end("completed")
    return without_on_demand(state.digest())


def test_sink_needs_no_arguments_and_has_summary(sink_class):
    """All arguments of the constructor are optional keywords."""
    assert isinstance(sink_class(), MetricSink)
    kinds = {option.kind for option in inspect.signature(sink_class).parameters.values()}
    assert kinds <= {inspect.Parameter.KEYWORD_ONLY}
    assert inspect.getdoc(sink_class).splitlines()[0].endswith(".")


def test_name_and_flag_are_unique(sink_class):
    others = [other for other in SinkRegistry if other is not sink_class]
    assert sink_class.name not in {other.name for other in others}
    assert sink_class.flag is None or sink_class.flag not in {other.flag for other in others}


def test_non_finite_values_are_kept(sink_class, tmp_path, capsys):
    sink = sink_class()
    sink.set_run_context(run_info(tmp_path))
    show(sink, {"h/a": float("nan"), "h/b": float("inf"), "h/c": float("-inf")}, 1)
    sink.close("completed")
    words = re.findall(r"-?(?:nan|inf)", produced(tmp_path, capsys), re.IGNORECASE)
    assert {word.lower() for word in words} == {"nan", "inf", "-inf"}


def test_non_finite_values_of_series_are_kept(sink_class, tmp_path, capsys):
    sink = sink_class()
    sink.set_run_context(run_info(tmp_path))
    show(
        sink, {"h/a": Series([1, 2], [1.0, float("nan")]), "h/b": Series([1], [float("-inf")])}, 2, HookPoint.POST_STEP
    )
    sink.close("completed")
    text = produced(tmp_path, capsys).lower()
    assert "nan" in text
    assert "-inf" in text


def test_emits_arrive_in_order(sink_class, tmp_path, capsys):
    sink = sink_class()
    sink.set_run_context(run_info(tmp_path))
    for number in range(7001, 7006):
        show(sink, {"h/number": number}, number - 7000)
    sink.close("completed")
    text = produced(tmp_path, capsys).replace(",", "")
    assert re.findall(r"700\d", text) == ["7001", "7002", "7003", "7004", "7005"]


def test_strategies_have_separate_output(sink_class, tmp_path, capsys):
    sink = sink_class()
    for strategy, number in (("first", 7001), ("second", 7002)):
        (tmp_path / strategy).mkdir()
        sink.set_run_context(run_info(tmp_path / strategy, strategy))
        show(sink, {"h/number": number}, 1)
    sink.close("completed")
    texts = [text for text in files(tmp_path) if text]
    assert len(texts) in (0, 2)
    assert all(("7001" in text) != ("7002" in text) for text in texts)
    text = produced(tmp_path, capsys).replace(",", "")
    assert text.index("7001") < text.index("7002")


def test_sink_can_be_flushed_and_closed_repeatedly(sink_class, tmp_path, capsys):
    """Flushing and closing also work before a run, and nothing is written twice."""
    sink = sink_class()
    sink.flush()
    sink.close("failed")
    sink.set_run_context(run_info(tmp_path))
    show(sink, {"h/number": 7001}, 1)
    sink.flush()
    sink.close("completed")
    before = produced(tmp_path, capsys)
    sink.close("completed")
    sink.flush()
    assert "7001" in before.replace(",", "")
    assert produced(tmp_path, capsys) in before


@pytest.mark.parametrize("closed", [False, True])
def test_emit_outside_a_strategy_raises(sink_class, tmp_path, closed):
    sink = sink_class()
    if closed:
        sink.set_run_context(run_info(tmp_path))
        sink.close("completed")
    with pytest.raises(RuntimeError, match="set_run_context"):
        sink.emit({"h/x": 1.0}, 0, HookPoint.POST_EPOCH, step=1)


@pytest.mark.longer
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize("loop", list(LOOPS))
def test_sink_does_not_change_the_run(sink_class, tmp_path, loop, capsys):
    """A run with any sink equals the run without it."""
    bare = run_with(tmp_path, [], loop)
    assert not differences(bare, run_with(tmp_path, [sink_class()], loop, audit=True))
    assert produced(tmp_path, capsys)


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize("method", ["set_run_context", "emit", "flush", "close"])
def test_failing_sink_is_disabled_and_run_continues(sink_class, tmp_path, method, capsys):
    """The state is bitwise unchanged, and other sinks receive every row."""

    def fail(self, *arguments, **options):
        raise OSError("No space left on device")

    broken, intact = type("Broken", (sink_class,), {method: fail})(), RecordingSink()
    with pytest.warns(UserWarning, match=f"Sink '{sink_class.name}' failed and is disabled.*No space left"):
        digest = run_with(tmp_path, [broken, intact])
    assert not differences(run_with(tmp_path, []), digest)
    run_with(tmp_path, [alone := RecordingSink()])
    assert len(intact.emitted) == len(alone.emitted) > 6
    super(type(broken), broken).close("failed")


FIRST = [({"h/number": 7001, "h/loss": 0.5}, 1), ({"h/number": 7002, "h/list": [0.1, float("nan")]}, 2)]
SECOND = [({"h/number": 7003, "h/loss": 0.25}, 3), ({"h/by": {"w": 1.5}, "h/number": 7004}, 4)]


def fed(sink, rows):
    """Emit rows and alerts, with a SNAPSHOT after every second row, and return the sink."""
    for metrics, step in rows:
        sink.emit(metrics, step, HookPoint.POST_EPOCH, step=step)
        sink.alert([Alert("It is large.", metric="number", step=step, value=metrics["h/number"], limit=float("inf"))])
        if step % 2:
            sink.snapshot(step, step)
    sink.emit({"h/series": Series([step], [step / 8])}, step, HookPoint.POST_STEP, step=step)
    return sink


def begun(sink_class, folder):
    folder.mkdir(exist_ok=True)
    sink = sink_class()
    sink.set_run_context(run_info(folder))
    return fed(sink, FIRST)


def tear(paths):
    """Append an incomplete line or event, as after a crash."""
    for path in paths:
        with path.open("ab") as file:
            file.write(path.read_bytes()[:20])


def test_resumed_sink_matches_uninterrupted_run(sink_class, tmp_path, capsys):
    """Rows after the position and a torn last line are removed from the files."""
    whole = begun(sink_class, tmp_path / "whole")
    capsys.readouterr()
    fed(whole, SECOND).close("completed")
    expected = produced(tmp_path / "whole", capsys)
    killed = begun(sink_class, tmp_path / "killed")
    position, paths = json.loads(json.dumps(killed.position())), killed.files()
    fed(killed, SECOND[:1])
    tear(paths)
    resumed = sink_class()
    resumed.resume(run_info(tmp_path / "killed"), position)
    capsys.readouterr()
    fed(resumed, SECOND).close("completed")
    assert produced(tmp_path / "killed", capsys) == expected
    killed.close("failed")


def test_sink_lists_its_open_files(sink_class, tmp_path, capsys):
    """The list has every file of the run, and is empty before and after it."""
    sink = sink_class()
    assert not sink.files()
    sink.set_run_context(run_info(tmp_path))
    assert set(sink.files()) == {path for path in tmp_path.rglob("*") if path.is_file()}
    sink.close("completed")
    assert not sink.files()


@pytest.mark.parametrize("damage", ["missing", "shorter", "another"])
def test_changed_file_is_refused_and_left_unchanged(sink_class, tmp_path, damage, capsys):
    """A missing, truncated or replaced file raises with a hint to use overwrite=True."""
    sink = begun(sink_class, tmp_path)
    position, paths = sink.position(), list(sink.files())
    sink.close("completed")
    for path in paths:
        content = path.read_bytes()
        size = position.get(path.name, position)["size"]
        path.unlink() if damage == "missing" else path.write_bytes(
            content[: size - 1] if damage == "shorter" else b"x" * len(content)
        )
        damaged = path.exists() and path.read_bytes()
        with pytest.raises(UsageError, match=rf"{path.name} .*overwrite=True"):
            sink_class().resume(run_info(tmp_path), position)
        assert (path.exists() and path.read_bytes()) == damaged
        path.write_bytes(content)


def test_position_outside_a_strategy_is_refused(sink_class, tmp_path, capsys):
    """This applies to sinks with files."""
    sink = begun(sink_class, tmp_path)
    paths = sink.files()
    sink.close("completed")
    if paths:
        with pytest.raises(RuntimeError, match="call emit and position after set_run_context"):
            sink.position()


def test_registry_returns_sink_by_name(sink_class):
    assert SinkRegistry.get(sink_class.name) is sink_class
    with pytest.raises(UsageError, match="Unknown sink"):
        SinkRegistry.get(sink_class.name + "x")


def test_sink_class_with_bad_declaration_is_refused(sink_class):
    """A missing name and an unknown option are refused."""
    registry = Registry("sink", "loopscope.none", check_sink_class)
    with pytest.raises(UsageError, match="needs a name"):
        registry.register(type("Nameless", (sink_class,), {"name": "sink"}))
    with pytest.raises(UsageError, match="'nowhere', which its constructor lacks"):
        registry.register(type("Lost", (sink_class,), {"option": "nowhere"}))


def test_sink_names_every_file_it_writes(sink_class, tmp_path, capsys):
    """file_names() has plain file names without placeholders or folders."""
    run_with(tmp_path, [sink_class()])
    assert {path.name for path in tmp_path.iterdir()} <= set(sink_class.file_names("only"))
    assert all("{" not in name and "/" not in name for name in sink_class.file_names("only"))
