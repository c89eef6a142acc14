"""Files of finished runs that change later: every command that reads them reports it."""

import json
import os
import shutil
from pathlib import Path

import loopscope
import pytest
import torch
from loopscope import sinks, training_hooks
from loopscope.cli import main
from loopscope.durable_files import read_tensors
from loopscope.report import read_run
from loopscope.runs import ALL, changed_files
from loopscope.runs.file_manifest import FILES

from tests.framework.runs.small_experiment import Small, registered

FILLED = (sinks, training_hooks)
RUN = ["run", "small", "--strategy", "plain", "--epochs", "2", "--no-console-output", "--hooks", "norms"]
READERS = {
    "show": ["show", "{run}"],
    "show --json": ["show", "{run}", "--json"],
    "doctor": ["doctor", "{run}"],
    "ls": ["ls", "{output}"],
    "plot": ["plot", "{run}", "--metrics", "training_metrics/loss", "--out", "{output}/picture.png"],
    "report": ["report", "{run}", "-o", "{output}/page.html"],
    "compare": ["compare", "{run}", "{whole}"],
    "diff": ["diff", "{run}", "{whole}"],
    "alerts": ["alerts", "{run}"],
    "resume": ["resume", "{run}"],
    "replay": ["replay", "{run}", "--to", "tensorboard"],
    "verify": ["verify", "{run}"],
    "rewind": ["rewind", "{run}", "--step", "2"],
}
OF_WEIGHTS = ("show", "doctor", "ls", "diff", "resume", "verify")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    """Train once, and return the folder of the run."""
    folder = tmp_path_factory.mktemp("whole")
    with registered(Small):
        assert main([*RUN, "--save-checkpoints", "--output-dir", str(folder)]) == 0
        yield folder / "small/plain"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "small/plain"))


def flip(path: Path, *, keeps_time: bool = False) -> None:
    """Change one bit in the middle of a file, with its time of modification or without."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if keeps_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def said_by(words: list[str], run: Path, whole: Path, capfd) -> str:
    capfd.readouterr()
    main([word.format(run=run, whole=whole, output=run.parent.parent) for word in words])
    return " ".join("".join(capfd.readouterr()).split())


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("reader", READERS)
def test_changed_record_is_reported(reader: str, run: Path, whole: Path, capfd, monkeypatch) -> None:
    """A digit of the record differs; an intact run is read without a word about damage."""
    monkeypatch.setenv("COLUMNS", "400")
    assert "damaged" not in said_by(READERS[reader], whole, whole, capfd)
    text = (run / "plain.jsonl").read_text()
    begin = text.index('"training_metrics/loss":') + len('"training_metrics/loss":')
    (run / "plain.jsonl").write_text(f"{text[:begin]}9{text[begin + 1 :]}")
    assert "plain.jsonl is damaged" in said_by(READERS[reader], run, whole, capfd)


@pytest.mark.guarantee("damage-is-detected")
@pytest.mark.parametrize("reader", OF_WEIGHTS)
def test_changed_weights_are_reported(reader: str, run: Path, whole: Path, capfd, monkeypatch) -> None:
    """A bit of the final weights differs."""
    monkeypatch.setenv("COLUMNS", "400")
    flip(run / "plain_final.pt")
    assert "plain_final.pt is damaged" in said_by(READERS[reader], run, whole, capfd)


@pytest.mark.guarantee("damage-is-detected")
def test_changed_reference_is_refused(run: Path, whole: Path, capfd) -> None:
    """The weights are checked even if their time of modification is that of the run."""
    flip(run / "plain_final.pt", keeps_time=True)
    words = [*RUN, "gradient_projection", "--reference", "{run}", "--output-dir", "{output}/other"]
    assert "plain_final.pt is damaged" in said_by(words, run, whole, capfd)
    assert not (run.parent.parent / "other").exists()


@pytest.mark.parametrize("name", [*sorted({"plain.jsonl", "summary.json", "plain_final.pt", "digests.jsonl", FILES})])
def test_every_changed_bit_is_found(name: str, run: Path) -> None:
    """Each file of the run, with its original time, and the manifest itself."""
    assert changed_files(run, ALL) == {}
    flip(run / name, keeps_time=True)
    assert [*changed_files(run, ALL)] == [name]


@pytest.mark.parametrize("damage", [os.remove, lambda path: os.truncate(path, 3), lambda path: path.write_bytes(b"")])
def test_lost_files_are_found(damage, run: Path) -> None:
    names = sorted(json.loads((run / FILES).read_text())["files"].keys() - {"alerts.jsonl", "plain_final.pt"})
    for name in names:
        damage(run / name)
    assert sorted(changed_files(run, ())) == names


def test_extended_record_is_no_damage(run: Path, capfd) -> None:
    """Rows that a user appends are reported, and the run is still read and verified."""
    line = (run / "plain.jsonl").read_text().splitlines()[-1]
    with (run / "plain.jsonl").open("a") as file:
        file.write(f"{line}\n")
    (change,) = changed_files(run, ALL).values()
    assert (change.is_damage, "was extended" in change.sentence) == (False, True)
    assert main(["verify", str(run)]) == 0


def test_removed_weights_are_written_again(run: Path, whole: Path) -> None:
    """The remedy of damaged weights works, and the run has a new manifest."""
    (run / "plain_final.pt").unlink()
    assert main(["resume", str(run)]) == 0
    assert changed_files(run, ALL) == {}
    weights, original = (read_tensors(folder / "plain_final.pt") for folder in (run, whole))
    assert all(torch.equal(weights[name], original[name]) for name in original)


def attached(folder: Path, *, steps: int = 4, **options) -> loopscope.Scope:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = loopscope.attach(model, optimizer, out=folder, display="none", **options)
    for batch in scope.batches([torch.ones(2, 3)] * steps):
        scope.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return scope


def test_attached_runs_have_a_manifest(tmp_path: Path) -> None:
    """A run in progress has none, and read_run warns of damage."""
    attached(tmp_path / "a").close()
    scope = attached(tmp_path / "a", overwrite=True)
    assert not (tmp_path / "a" / FILES).exists()
    scope.close()
    assert changed_files(tmp_path / "a", ALL) == {}
    flip(tmp_path / "a/a.jsonl")
    with pytest.warns(UserWarning, match="a.jsonl is damaged"):
        read_run(tmp_path / "a")


def test_special_manifests_are_reported(run: Path) -> None:
    """A pipe, a folder and other JSON in place of the manifest are reported, and never block."""
    for replace in (os.mkfifo, os.mkdir, lambda path: Path(path).write_text('{"files": 3, "digest": ""}')):
        path = run / FILES
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        replace(path)
        assert "cannot be checked" in changed_files(run, ALL)[FILES].sentence
