"""The MLflow sink with the real client and local stores."""

import math
import os
import sqlite3
import sys
from contextlib import closing
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, Series
from loopscope.sinks import MLflowSink, client_sink, read_jsonl
from loopscope.sinks.client_process import ClientTask
from loopscope.sinks.mlflow_process import LONGEST_KEY, MOST_METRICS, MOST_TAGS, ROWS, Batch, start_run, valid_key

from tests.sinks.emits import run_info
from tests.sinks.test_sink_contracts import run_with
from tests.support import differences

pytestmark = [
    pytest.mark.filterwarnings("ignore::loopscope.errors.RunNotice"),
    # Importing MLflow here would take seconds, and the tests read its stores without it.
    pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed"),
]

SERIES = {"h/s": Series([1, 2, 4], [0.5, math.nan, 2.5]), "h/d": Series([2], [{"w[0]": 1.0}])}
VALUES = {"h/a": 0.1, "h/inf": -math.inf, "h/flag": True, "h/list": [1.0, 3.0, math.nan], "h/text": "word"}
LATER = {"h/a": 0.2}
CONFIG = {"lr": 0.25, "adam": {"betas": [0.9, 0.99]}}


def clean_environment(patch):
    """Remove MLflow's variables, and wait up to two minutes for the client."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        patch.delenv(name)
    patch.setattr(client_sink, "LONGEST_WAIT", 120.0)


@pytest.fixture(autouse=True)
def isolated_mlflow(monkeypatch):
    clean_environment(monkeypatch)


@pytest.fixture
def file_store(monkeypatch, tmp_path):
    """A store in files, which is faster than a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))


def steps_of(record):
    """Return the steps of all values of a record."""
    series = [value for value in record.metrics.values() if isinstance(value, Series)]
    return {number for value in series for number in value.steps} or {record.step}


def started(folder, **options):
    sink = MLflowSink(**options)
    sink.set_run_context(run_info(folder, config=CONFIG, treatments={"grad_clip": ("gradients",)}))
    return sink


def fed(sink, *epochs):
    for epoch, metrics in enumerate(epochs):
        sink.emit(metrics, epoch, HookPoint.POST_EPOCH, step=4 + epoch)
    return sink


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run in a database that was interrupted after two emits and resumed after the first of them."""
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder}/store.db"
    with pytest.MonkeyPatch.context() as patch:
        clean_environment(patch)
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        patch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
        sink = started(folder)
        sink.emit(SERIES, 0, HookPoint.POST_STEP, step=4)
        position = sink.position()
        fed(sink, VALUES).close("interrupted")
        sink = MLflowSink()
        sink.resume(run_info(folder, config=CONFIG), position)
        fed(sink, VALUES, LATER).close("completed")
    return folder


def table(folder, query):
    with closing(sqlite3.connect(folder / "store.db")) as database:  # Python 3.13 warns about an open connection
        return database.execute(query).fetchall()


def history(folder, name):
    """Return steps and values of a metric; its NaN is None."""
    query = f"SELECT step, CASE WHEN is_nan THEN NULL ELSE value END FROM metrics WHERE key = '{name}' ORDER BY step"
    return table(folder, query)


@pytest.mark.slow  # MLflow creates its database in ten seconds
def test_mlflow_values_arrive_once_after_resume(resumed):
    """Every value is stored at its step, and rows that the first client had sent are not sent again."""
    assert history(resumed, "h/s") == [(1, 0.5), (2, None), (4, 2.5)]
    assert history(resumed, "h/d/w_0_") == [(2, 1.0)]
    assert history(resumed, "h/a") == [(4, 0.1), (5, 0.2)]
    assert history(resumed, "h/flag") == [(4, 1.0)]
    assert [history(resumed, f"h/list/{part}") for part in ("mean", "min", "max", "non_finite")] == [
        [(4, 2.0)], [(4, 1.0)], [(4, 3.0)], [(4, 1.0)],
    ]  # fmt: skip
    assert history(resumed, "h/inf")[0][1] < -1e308
    assert len(list(read_jsonl(resumed / "only.jsonl"))) == 3


@pytest.mark.slow
def test_mlflow_run_has_parameters_and_status(resumed):
    """Options are parameters, texts are tags, and the program is the one that trains."""
    query = "SELECT runs.name, status, experiments.name FROM runs JOIN experiments USING (experiment_id)"
    assert table(resumed, query) == [("only", "FINISHED", "mine")]
    parameters = dict(table(resumed, "SELECT key, value FROM params"))
    assert (parameters["lr"], parameters["adam.betas"]) == ("0.25", "[0.9, 0.99]")
    tags = dict(table(resumed, "SELECT key, value FROM tags"))
    assert (tags["treatment:grad_clip"], tags["h/text"], tags[ROWS]) == ("true", "word", "5")
    assert tags["mlflow.source.name"] == sys.argv[0]


@pytest.mark.process
@pytest.mark.guarantee("monitoring-changes-nothing")
def test_mlflow_sink_leaves_run_unchanged(tmp_path, file_store):
    """The run has the same bytes and the same variables with the sink, and the experiment is named after it."""
    bare = run_with(tmp_path, [])
    variables = dict(os.environ)
    watched = run_with(tmp_path, [MLflowSink()], audit=True)
    assert not differences(bare, watched)
    assert dict(os.environ) == variables
    assert any("name: exp\n" in path.read_text() for path in tmp_path.glob("mlruns/*/meta.yaml"))
    (path,) = tmp_path.glob("mlruns/*/*/metrics/spy/step")
    steps = {int(line.split()[2]) for line in path.read_text().splitlines()}  # a line has the time, the value, the step
    assert steps == {number for record in read_jsonl(tmp_path / "only.jsonl") for number in steps_of(record)}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.guarantee("monitoring-changes-nothing")
def test_mlflow_without_server_only_warns(tmp_path, monkeypatch):
    """The warning has the reason and the replay command, and the record is complete."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sink = fed(started(tmp_path, experiment="mine"), VALUES)
    with pytest.warns(UserWarning, match=r"MLflow client failed: .*127\.0\.0\.1.*--to mlflow --experiment mine"):
        sink.close("completed")
    assert len(list(read_jsonl(tmp_path / "only.jsonl"))) == 1


class Calls:
    """An MLflow module that records calls, without a store."""

    def __init__(self):
        self.entities = SimpleNamespace(Metric=lambda *fields: fields, RunTag=lambda *fields: fields)
        self.batches, self.experiments = [], []
        self.MlflowClient = lambda: self

    def log_batch(self, run_id, metrics, tags):
        self.batches.append((list(metrics), list(tags)))

    def set_experiment(self, name):
        self.experiments.append(name)

    def start_run(self, **options):
        return options

    def log_params(self, parameters):
        pass


def test_large_rows_are_split_into_requests():
    """No request exceeds the limits, nothing is lost, and only the last one has the number of rows."""
    calls = Calls()
    batch = Batch(calls, "run")
    batch.add({"step": 1, "epoch": 0, **{f"h/{n}": n for n in range(2500)}, **{f"t/{n}": "x" for n in range(200)}})
    assert batch.is_full
    batch.send(1)
    assert max(len(metrics) for metrics, _ in calls.batches) <= MOST_METRICS
    assert max(len(tags) for _, tags in calls.batches) <= MOST_TAGS + 1
    assert sum(len(metrics) for metrics, _ in calls.batches) == 2501
    counts = [tag for _, tags in calls.batches for tag in tags if tag[0] == ROWS]
    assert counts == [calls.batches[-1][1][-1]] == [(ROWS, "1")]


@pytest.mark.parametrize(
    ("variables", "option", "expected"),
    [
        ({}, None, ["exp"]),
        ({"MLFLOW_EXPERIMENT_NAME": "mine"}, None, []),
        ({"MLFLOW_EXPERIMENT_ID": "7"}, None, []),
        ({"MLFLOW_EXPERIMENT_NAME": "mine"}, "chosen", ["chosen"]),
    ],
)
def test_experiment_is_from_option_variable_or_default(monkeypatch, variables, option, expected):
    """Nothing is selected if MLflow reads the experiment from a variable."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls = Calls()
    start_run(calls, ClientTask("r", "folder", option, "exp", "s", {}, {}, [], None))
    assert calls.experiments == expected


@pytest.mark.process  # the import takes seconds
@pytest.mark.parametrize("name", ["a//b", "/a", "a/./b", "a/../b", "ü=1", "x" * 300, "a\nb", 'q"q', "h/m"])
def test_metric_names_are_accepted_by_mlflow(name):
    from mlflow.utils.validation import _validate_metric

    key = valid_key(name)
    _validate_metric(key, 1.0, 0, 0)
    assert len(key) <= LONGEST_KEY
    assert (key == name) == (name == "h/m")


@pytest.mark.parametrize("name", ["", " ", "p" * 501])
def test_invalid_mlflow_experiment_is_refused(name):
    with pytest.raises(UsageError, match="is not a valid MLflow experiment"):
        MLflowSink(experiment=name)


def test_missing_mlflow_error_shows_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"'mlflow' needs the package mlflow, .*: pip install 'mlflow>=[\d.]+'"):
        MLflowSink()
