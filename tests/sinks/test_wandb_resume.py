"""Resumed W&B runs with the real client: every row exists exactly once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopscope.errors import RunNotice
from loopscope.hooks import HookPoint
from loopscope.sinks import WandbSink, client_sink
from loopscope.sinks.client_process import ClientTask, Feed, exclusive_run
from loopscope.sinks.wandb_process import sent_row_count

from tests.sinks.emits import run_info
from tests.sinks.wandb_files import history
from tests.sinks.wandb_server import HISTORY, wandb_server

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.errors.RunNotice")
ROWS = [1, 2, 3, 4, 5, 6]
WHOLE = [{"step": step, "epoch": step, "h/a": step / 8} for step in ROWS]


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


@pytest.fixture
def server(monkeypatch):
    """A server with a login."""
    with wandb_server() as local_server:
        monkeypatch.setenv("WANDB_BASE_URL", local_server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        yield local_server


def fed(sink, rows):
    for step in rows:
        sink.emit({"h/a": step / 8}, step, HookPoint.POST_EPOCH, step=step)
    return sink


def begun(folder, rows):
    sink = WandbSink(project="demo")
    sink.set_run_context(run_info(folder))
    return fed(sink, rows)


def resumed(folder, position, rows):
    sink = WandbSink(project="demo")
    sink.resume(run_info(folder), position)
    return fed(sink, rows)


def interrupted(folder, before, after):
    """Run with the rows ``before`` and then ``after``; return the position between them."""
    sink = begun(folder, before)
    position = sink.position()
    fed(sink, after).close("interrupted")
    return position


def logs_in(folder):
    """Return the logs of the clients, oldest first."""
    return sorted(folder.glob("wandb/*run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime)


def synced(folders):
    """Send offline records with the command ``wandb sync``."""
    wandb = Path(sys.executable).with_name("wandb")
    subprocess.run([wandb, "sync", "--yes", *folders], check=True, capture_output=True, timeout=240, cwd=folders[0])


@pytest.mark.slow
@pytest.mark.process
def test_online_resume_continues_the_same_wandb_run(tmp_path, server):
    """Every row is in the run once, with consecutive steps."""
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    (run,) = server.runs.values()
    assert run.rows() == WHOLE
    assert run.steps() == list(range(len(WHOLE)))
    assert run.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("arrived", [0, 1, 3])
def test_missing_rows_are_sent_after_resume(tmp_path, server, arrived):
    """For any number of rows that reached the server, the run ends with every row once."""
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    (run,) = server.runs.values()
    del run.files[HISTORY][arrived:]
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    assert run.rows() == WHOLE


@pytest.mark.slow
def test_offline_resume_is_synced_from_named_folders(tmp_path, server, monkeypatch):
    """The notice lists the folders for wandb sync, and together they give the whole run."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    with pytest.warns(RunNotice, match="recorded offline; to send it: wandb sync") as notices:
        resumed(tmp_path, position, ROWS[2:]).close("completed")
    assert [history(log) for log in logs_in(tmp_path)] == [WHOLE[:4], WHOLE[4:]]
    folders = str(notices[0].message).partition("wandb sync ")[2].split()
    assert folders == [str(log.parent) for log in logs_in(tmp_path)]
    synced(folders)
    (run,) = server.runs.values()
    assert (run.rows(), run.steps()) == (WHOLE, list(range(len(WHOLE))))


@pytest.mark.slow
def test_removed_offline_folders_are_not_recorded_again(tmp_path, monkeypatch):
    """After a resume, only the new rows are recorded offline."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    shutil.rmtree(logs_in(tmp_path)[0].parent)
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    assert [history(log) for log in logs_in(tmp_path)] == [WHOLE[4:]]


@pytest.mark.slow
def test_killed_client_leaves_its_row_count(tmp_path, monkeypatch):
    """The resumed run records only the rows that the killed client did not."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = begun(tmp_path, ROWS[:2])
    position = sink.position()
    fed(sink, ROWS[2:4])
    note = tmp_path / "wandb" / f"{position['run_id']}.rows"
    while not note.exists() or note.read_text().strip() != "4":
        time.sleep(0.1)
    sink._client.process.kill()
    with pytest.warns(UserWarning, match="The W&B client failed"):
        sink.close("failed")
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    assert history(logs_in(tmp_path)[-1]) == WHOLE[4:]


@pytest.mark.parametrize(("is_resumed", "offline", "expected"), [(False, True, 0), (True, False, 2), (True, True, 7)])
def test_row_count_is_from_server_or_note(is_resumed, offline, expected):
    task = ClientTask("r", "folder", "p", "e", "s", {}, {}, [], None, resumed=is_resumed)
    feed = Feed(task, None, StringIO(" 7"))
    assert sent_row_count(task, SimpleNamespace(offline=offline, starting_step=2), feed) == expected


@pytest.mark.slow
def test_offline_run_resumed_online_is_sent_once(tmp_path, server, monkeypatch):
    """Syncing the old offline folder afterwards adds no row."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    monkeypatch.delenv("WANDB_MODE")
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    synced([logs_in(tmp_path)[0].parent])
    (run,) = server.runs.values()
    assert run.rows() == WHOLE


@pytest.mark.slow
def test_disabled_sink_is_sent_whole_after_resume(tmp_path, server, monkeypatch):
    """The run started with WANDB_MODE=disabled."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    monkeypatch.delenv("WANDB_MODE")
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    assert [run.rows() for run in server.runs.values()] == [WHOLE]


KILLED = """
import json, sys, time
from pathlib import Path
from tests.sinks.test_wandb_resume import begun, fed
sink = begun(Path(sys.argv[1]), [1, 2])
print(json.dumps(sink.position()), flush=True)
fed(sink, [3, 4])
print("fed", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_resume_after_kill_waits_for_surviving_client(tmp_path, server):
    """The client process of a killed run finishes first, and a torn record line is ignored."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        position = json.loads(run.stdout.readline())
        assert run.stdout.readline() == "fed\n"
        os.killpg(run.pid, signal.SIGKILL)
    with (tmp_path / "only.jsonl").open("a") as record:
        record.write('{"torn')
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    (stored,) = server.runs.values()
    assert (stored.rows(), stored.exit_code) == (WHOLE, 0)


def test_client_waits_for_earlier_client_of_run(tmp_path):
    """Two clients of one run do not work at the same time."""
    task = ClientTask("r", str(tmp_path), "p", "e", "s", {}, {}, [], None, run_id="abc")
    (tmp_path / "wandb").mkdir()
    order = []

    def later():
        with exclusive_run(task):
            order.append("later")

    with exclusive_run(task):
        thread = threading.Thread(target=later)
        thread.start()
        time.sleep(0.2)
        order.append("earlier")
    thread.join()
    assert order == ["earlier", "later"]
