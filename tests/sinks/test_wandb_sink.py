"""The W&B sink with the real client: offline records, and effects of client failures on a run."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import HookPoint, Series
from loopscope.sinks import JSONLSink, WandbSink, client_sink, read_jsonl

from tests.framework.runs.small_experiment import SmallConfig
from tests.sinks.emits import run_info
from tests.sinks.test_sink_contracts import run_with
from tests.sinks.wandb_files import axes, config_of, history, log_of, only
from tests.support import differences

pytestmark = pytest.mark.process

SERIES = {"h/s": Series([1, 2, 4], [0.5, math.nan, 2.5]), "h/d": Series([2], [{"w": 1.0}])}
VALUES = {"h/a": 0.1, "h/inf": -math.inf, "h/flag": True, "h/list": [1.0, 2.0, math.nan], "h/by/layers.0.weight": 3}
TREATMENTS = {"grad_clip": ("gradients",)}
KEY = "k" * 40
DEFAULT_WAIT = client_sink.LONGEST_WAIT


@pytest.fixture(autouse=True)
def isolated_wandb(monkeypatch, tmp_path_factory):
    """Remove login and settings, and wait up to a minute for the client."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setattr(client_sink, "LONGEST_WAIT", 60.0)


def started(folder, strategy="only", project="demo", **run):
    folder.mkdir(exist_ok=True)
    sink = WandbSink(project=project)
    sink.set_run_context(run_info(folder, strategy, **run))
    return sink


def fed(sink):
    sink.emit(SERIES, 0, HookPoint.POST_STEP, step=4)
    sink.emit(VALUES, 0, HookPoint.POST_EPOCH, step=4)
    return sink


def alive(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def client_of(sink):
    return sink._client.process


@dataclass
class Offline:
    folder: Path
    notices: list[str]


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """Two strategies of one experiment, recorded offline by two clients."""
    folder = tmp_path_factory.mktemp("offline")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RunNotice)
        patch.setattr(client_sink, "LONGEST_WAIT", 60.0)
        for name in ("WANDB_MODE", "WANDB_API_KEY"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(folder / "netrc"))
        config = SmallConfig(lr=0.25, output_dir=folder)
        sinks = [started(folder / name, name, config=config, treatments=TREATMENTS) for name in ("one", "two")]
        for sink, status in zip(sinks, ("completed", "failed"), strict=True):
            fed(sink).close(status)
    return Offline(folder, [str(warning.message) for warning in caught if warning.category is RunNotice])


def test_values_are_logged_at_their_own_step(offline):
    """Series, nested values, flags and non-finite values are in the rows of their steps."""
    rows = history(log_of(offline.folder / "one"))
    assert [row.pop("epoch") for row in rows] == [0, 0, 0, 0]
    first, second, third, last = rows
    assert first == {"step": 1, "h/s": 0.5}
    assert math.isnan(second.pop("h/s"))
    assert second == {"step": 2, "h/d/w": 1.0}
    assert (third["step"], third["h/s"], math.isnan(third["h/s/mean"])) == (4, 2.5, True)
    assert (sum(third["h/s/histogram"][0]), third["h/s/histogram/non_finite"]) == (2, 1)
    assert {name: last[name] for name in ("step", "h/a", "h/inf", "h/flag", "h/by/layers.0.weight")} == {
        "step": 4, "h/a": 0.1, "h/inf": -math.inf, "h/flag": 1, "h/by/layers.0.weight": 3,
    }  # fmt: skip


def test_list_is_logged_as_histogram(offline):
    """The histogram covers the finite values, and the others are counted."""
    last = history(log_of(offline.folder / "one"))[-1]
    counts, limits = last["h/list"]
    assert (sum(counts), limits[0], limits[-1], last["h/list/non_finite"]) == (2, 1.0, 2.0, 1)


def test_jsonl_record_is_lossless(offline):
    """The JSONL file next to the W&B run has all values and series."""
    records = list(read_jsonl(offline.folder / "one/one.jsonl"))
    assert [record.hook_point for record in records] == [HookPoint.POST_STEP, HookPoint.POST_EPOCH]
    assert records[1].metrics["h/a"] == VALUES["h/a"]
    assert records[0].metrics["h/s"].steps == [1, 2, 4]


def test_step_is_the_axis_of_every_metric(offline):
    assert axes(log_of(offline.folder / "one")) == {"step": "", "*": "step"}


def test_strategies_form_one_wandb_group(offline):
    """Each run has the project, configuration, strategy and treatments."""
    runs = [only(log_of(offline.folder / name), "run") for name in ("one", "two")]
    assert [(run.project, run.run_group, run.display_name) for run in runs] == [
        ("demo", "exp", "one"),
        ("demo", "exp", "two"),
    ]
    assert list(runs[0].tags) == ["treatment:grad_clip"]
    config = config_of(log_of(offline.folder / "one"))
    assert (config["lr"], config["strategy"], config["treatments"]) == (0.25, "one", {"grad_clip": ["gradients"]})
    assert config.keys() >= SmallConfig().as_dict().keys()


@pytest.mark.slow
def test_wandb_variables_have_their_effect(tmp_path, monkeypatch):
    """W&B's own client reads them; without an option they replace loopscope's defaults."""
    variables = {"PROJECT": "mine", "ENTITY": "us", "NAME": "seventh", "RUN_GROUP": "sweep", "TAGS": "a,b"}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    fed(started(tmp_path, project=None, treatments=TREATMENTS)).close("completed")
    run = only(log_of(tmp_path), "run")
    assert (run.project, run.entity, run.display_name, run.run_group) == ("mine", "us", "seventh", "sweep")
    assert sorted(run.tags) == ["a", "b", "treatment:grad_clip"]


def test_status_of_run_is_its_exit_code(offline):
    assert [only(log_of(offline.folder / name), "exit").exit_code for name in ("one", "two")] == [0, 1]


def test_offline_notice_shows_sync_command(offline):
    """Without a login, each run prints the sync command for its folder."""
    folders = [log_of(offline.folder / name).parent for name in ("one", "two")]
    assert [notice.partition("wandb sync ")[2] for notice in offline.notices] == list(map(str, folders))


def test_online_mode_without_login_warns(tmp_path, monkeypatch):
    """The warning shows how to send the metrics later, and the local record is complete."""
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.warns(UserWarning, match=r"client failed: UsageError: No API key.* No metric is lost; send them with"):
        fed(started(tmp_path)).close("completed")
    assert len(list(read_jsonl(tmp_path / "only.jsonl"))) == 2


@pytest.mark.guarantee("monitoring-changes-nothing")
def test_wandb_sink_leaves_run_unchanged(tmp_path):
    """The run has the same bytes with the sink, and every recorded step is in the W&B history."""
    bare = run_with(tmp_path, [])
    watched = run_with(tmp_path, [sink := WandbSink(project="demo")], audit=True)
    assert not differences(bare, watched)
    assert sink._client is None
    steps = {record.step for record in read_jsonl(tmp_path / "only.jsonl")}
    assert steps <= {row["step"] for row in history(log_of(tmp_path))}


@pytest.fixture
def silent_server(monkeypatch):
    """A server with a login, which accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def accept():
            with suppress(OSError):
                while True:
                    connections.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield connections
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


def seconds_of(folder, sink):
    begin = time.perf_counter()
    run_with(folder, [sink])
    return time.perf_counter() - begin


@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.slow
def test_hanging_client_delays_run_briefly(tmp_path, monkeypatch, silent_server):
    """A client without an answer costs less than a second and gives up in the background."""
    monkeypatch.setattr(client_sink, "LONGEST_WAIT", DEFAULT_WAIT)
    monkeypatch.setattr(client_sink, "PATIENCE", 8.0)
    alone = min(seconds_of(tmp_path, JSONLSink()) for _ in range(6))
    with pytest.warns(RunNotice, match=rf"still sending .*loopscope replay {tmp_path} --to wandb --project demo"):
        hanging = min(seconds_of(tmp_path, WandbSink(project="demo")) for _ in range(6))
    assert DEFAULT_WAIT <= hanging < alone + 1.0
    assert client_sink._abandoned[-1].wait(240) == 3
    assert silent_server
    assert len(list(read_jsonl(tmp_path / "only.jsonl"))) > 6


@pytest.mark.guarantee("monitoring-changes-nothing")
def test_dead_client_warns_once(tmp_path):
    """The warning shows the replay command, and the local record is complete."""
    sink = started(tmp_path)
    client_of(sink).kill()
    client_of(sink).wait()
    with pytest.warns(
        UserWarning, match="client failed: exit status -9;.*No metric is lost; .*loopscope replay"
    ) as caught:
        fed(sink)
    sink.close("completed")
    assert len(caught) == 1
    assert len(list(read_jsonl(tmp_path / "only.jsonl"))) == 2


def test_failing_client_reports_its_reason(tmp_path, monkeypatch):
    """The warning has the error of the client and the path of its log."""
    monkeypatch.setenv("WANDB_MODE", "online")
    sink = started(tmp_path)
    with pytest.warns(UserWarning, match=r"client failed: .*No API key.*see .*client\.log"):
        sink.close("completed")


def test_unstartable_client_causes_only_a_warning(tmp_path, monkeypatch):
    """The local record is complete."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.warns(UserWarning, match="could not be started.*nowhere.*No metric is lost"):
        sink = started(tmp_path)
    fed(sink).close("completed")
    assert len(list(read_jsonl(tmp_path / "only.jsonl"))) == 2


KILLED = """
import sys, time
from pathlib import Path
from tests.sinks.test_wandb_sink import fed, started
sink = fed(started(Path(sys.argv[1])))
print(sink._client.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_client_survives_killed_run(tmp_path):
    """The client sends all recorded rows, reports exit code 1 and ends."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        pid = int(run.stdout.readline())
        os.killpg(run.pid, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)
    assert [row["step"] for row in history(log_of(tmp_path))] == [1, 2, 4, 4]
    assert only(log_of(tmp_path), "exit").exit_code == 1


def test_a_disabled_client_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sink = started(tmp_path)
    assert sink._client is None
    fed(sink).close("completed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alerts.jsonl", "only.jsonl"]


@pytest.mark.parametrize("name", ["", "a/b", "me:x", "p" * 129])
def test_invalid_wandb_project_is_refused(name):
    with pytest.raises(UsageError, match=r"is not a valid W&B project.*WANDB_ENTITY"):
        WandbSink(project=name)


def test_missing_wandb_error_shows_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"'wandb' needs the package wandb, .*: pip install 'wandb>=[\d.]+'"):
        WandbSink()


def test_client_job_is_plain_json(tmp_path, monkeypatch):
    """The project is left to the client, and paths in the configuration become strings."""
    monkeypatch.setattr(sys, "executable", "/bin/cat")
    sink = started(tmp_path, project=None, config={"path": Path("a"), "lr": 0.5})
    with pytest.warns(UserWarning, match="failed"):
        sink.close("completed")
    task = json.loads((tmp_path / "wandb/client.json").read_text())
    assert (task["project"], task["config"], task["pid"]) == (None, {"path": "a", "lr": 0.5}, os.getpid())
