"""``--on-options``: resources of jobs as words or in a YAML file, and the sentences about bad ones."""

import sys
from pathlib import Path

import pytest
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.errors import RunNotice, UsageError
from loopscope.sweeps import JobOptions

from tests.framework.runs.small_experiment import Small, contents, registered

assert experiments.__all__
assert sinks.__all__
assert training_hooks.__all__


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    """Return the sentence with which the command refuses jobs; nothing is written."""
    with registered(Small):
        assert main(["run", "small", "--output-dir", str(folder / "out"), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert contents(folder) == {}
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("gpus=2", "gpus_per_node", 2),
        ("cpus=8", "cpus_per_task", 8),
        ("mem=512M", "mem_gb", 0.5),
        ("mem=1.5T", "mem_gb", 1536.0),
        ("time=2:00:00", "timeout_min", 120),
        ("time=0:30", "timeout_min", 1),
        ("time=1-2:30", "timeout_min", 1590),
        ("partition=gpu", "slurm_partition", "gpu"),
        ("account=a=b", "slurm_account", "a=b"),
    ],
)
def test_options_become_those_of_submitit(word: str, name: str, value: object) -> None:
    assert JobOptions.of("slurm", [word]).resources == {name: value}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("gpus=two", "--on-options gpus=two must be a whole number, such as gpus=1."),
        ("mem=16", "--on-options mem=16 must be a number with M, G or T, such as mem=16G."),
        ("time=2h", "--on-options time=2h must be minutes, or hours as in time=2:00:00."),
        ("time=0", "--on-options time=0 must be minutes, or hours as in time=2:00:00."),
        ("gpus", "--on-options takes NAME=VALUE, such as gpus=1, but got 'gpus'."),
        (
            "partitoin=gpu",
            "Unknown option of --on-options: 'partitoin'. Did you mean 'partition'? Known: account, cluster, "
            "constraint, cpus, gpus, mem, partition, qos, time.",
        ),
        ("cluster=slrum", "Unknown cluster of --on-options: 'slrum'. Did you mean 'slurm'? Known: local, slurm."),
    ],
)
def test_bad_options_are_named_with_a_remedy(word: str, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        JobOptions.of("slurm", [word])
    assert str(error.value) == sentence


def test_options_without_effect_here_are_reported() -> None:
    with pytest.warns(RunNotice, match="Jobs on this machine have no partition, mem"):
        options = JobOptions.of("slurm", ["partition=gpu", "mem=4G", "time=9", "cluster=local"])
    assert options.is_local
    assert options.resources["timeout_min"] == 9


def test_options_come_from_a_yaml_file(capsys, tmp_path: Path) -> None:
    file = tmp_path.parent / f"{tmp_path.name}.yaml"
    file.write_text("gpus: 1\ntime: half\n")
    line = refusal(capsys, tmp_path, "--on", "local", "--on-options", str(file))
    assert line.startswith("loopscope: --on-options time=half must be minutes")
    file.unlink()


def test_options_need_a_cluster(capsys, tmp_path: Path) -> None:
    line = refusal(capsys, tmp_path, "--on-options", "gpus=1")
    assert line == "loopscope: --on-options are options of the jobs of --on slurm or --on local; add one of them."


def test_missing_slurm_is_one_sentence(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    line = refusal(capsys, tmp_path, "--on", "slurm")
    assert "this machine has no sbatch; start it where they are installed" in line
    assert line.endswith("or try the jobs on this machine: --on local.")


def test_missing_submitit_is_one_sentence(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    line = refusal(capsys, tmp_path, "--on", "local")
    assert line.endswith('--on needs the package submitit, which is not installed: pip install "loopscope[slurm]".')


@pytest.mark.parametrize("word", ["3-1", "0-10000"])
def test_empty_and_endless_ranges_are_refused(capsys, tmp_path: Path, word: str) -> None:
    line = refusal(capsys, tmp_path, "--seeds", word)
    assert line.startswith(f"loopscope: The range {word} has ")
    assert line.endswith(" numbers; it must have 1 to 10,000, as in --seeds 0-19.")


def test_jobs_do_not_share_one_run(capsys, tmp_path: Path) -> None:
    line = refusal(capsys, tmp_path, "--on", "local", "--parallel", "ddp")
    assert "--on trains several runs, --parallel trains one run in several processes" in line
