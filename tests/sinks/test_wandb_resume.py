"""A W&B run that goes on after a resume, with the real client: no row is lost, none is there twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from loopscope.errors import RunNotice
from loopscope.hooks import HookPoint
from loopscope.sinks import WandbSink, wandb_sink
from loopscope.sinks.wandb_process import Job, alone

from tests.sinks.emits import run_info
from tests.sinks.wandb_files import history
from tests.sinks.wandb_server import HISTORY, wandb_server

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.errors.RunNotice")
ROWS = [1, 2, 3, 4, 5, 6]
WHOLE = [{"step": step, "epoch": step, "h/a": step / 8} for step in ROWS]


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path_factory):
    """Have no login and no settings, and give the client all the time it needs."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setattr(wandb_sink, "LONGEST_WAIT", 60.0)


@pytest.fixture
def server(monkeypatch):
    """A server, and a login for it."""
    with wandb_server() as found:
        monkeypatch.setenv("WANDB_BASE_URL", found.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        yield found


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
    """Return the position after the rows ``before`` of a run that ended after those ``after`` them."""
    sink = begun(folder, before)
    position = sink.position()
    fed(sink, after).close("interrupted")
    return position


def logs_in(folder):
    """Return the logs that the clients wrote, oldest first."""
    return sorted(folder.glob("wandb/*run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime)


def synced(folders):
    """Let W&B's own command send what was recorded offline."""
    wandb = Path(sys.executable).with_name("wandb")
    subprocess.run([wandb, "sync", "--yes", *folders], check=True, capture_output=True, timeout=60, cwd=folders[0])


@pytest.mark.process
def test_a_run_resumed_online_goes_on_in_its_w_b_run_with_every_row_once(tmp_path, server):
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    (run,) = server.runs.values()
    assert run.rows() == WHOLE
    assert run.steps() == list(range(len(WHOLE)))
    assert run.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("arrived", [0, 1, 3])
def test_rows_that_never_arrived_are_sent_after_the_resume(tmp_path, server, arrived):
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    (run,) = server.runs.values()
    del run.files[HISTORY][arrived:]
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    assert run.rows() == WHOLE


@pytest.mark.slow
def test_a_run_resumed_offline_is_sent_whole_from_the_folders_that_the_notice_names(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    with pytest.warns(RunNotice, match="recorded offline; to send it: wandb sync") as told:
        resumed(tmp_path, position, ROWS[2:]).close("completed")
    assert [history(log) for log in logs_in(tmp_path)] == [WHOLE[:4], WHOLE[4:]]
    folders = str(told[0].message).partition("wandb sync ")[2].split()
    assert folders == [str(log.parent) for log in logs_in(tmp_path)]
    synced(folders)
    (run,) = server.runs.values()
    assert (run.rows(), run.steps()) == (WHOLE, list(range(len(WHOLE))))


@pytest.mark.slow
def test_folders_that_were_sent_and_removed_are_not_recorded_again(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    shutil.rmtree(logs_in(tmp_path)[0].parent)
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    assert [history(log) for log in logs_in(tmp_path)] == [WHOLE[4:]]


@pytest.mark.slow
def test_a_run_begun_offline_and_resumed_online_is_sent_whole_and_its_folder_not_again(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    position = interrupted(tmp_path, ROWS[:2], ROWS[2:4])
    monkeypatch.delenv("WANDB_MODE")
    resumed(tmp_path, position, ROWS[2:]).close("completed")
    synced([logs_in(tmp_path)[0].parent])
    (run,) = server.runs.values()
    assert run.rows() == WHOLE


@pytest.mark.slow
def test_a_run_whose_sink_was_disabled_is_sent_whole_after_the_resume(tmp_path, server, monkeypatch):
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
def test_a_killed_run_that_is_resumed_at_once_waits_for_the_client_that_goes_on_alone(tmp_path, server):
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


def test_a_client_does_not_begin_before_an_earlier_one_of_its_run_has_ended(tmp_path):
    job = Job("r", str(tmp_path), "p", "e", "s", {}, {}, [], None, run_id="abc")
    (tmp_path / "wandb").mkdir()
    order = []

    def later():
        with alone(job):
            order.append("later")

    with alone(job):
        thread = threading.Thread(target=later)
        thread.start()
        time.sleep(0.2)
        order.append("earlier")
    thread.join()
    assert order == ["earlier", "later"]
