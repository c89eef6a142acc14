"""Command line: output, precedence of presets, files and flags, and options of the run."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.cli.options import parse_run
from loopscope.hooks import ExperimentRegistry, HookRegistry

from tests.docs.markdown import ROOT
from tests.framework.runs.small_experiment import STEPS_PER_EPOCH, Small, read_json, registered

FILLED = (experiments, sinks, training_hooks)
COMMANDS = ("run", "resume", "diff", "plot", "report", "new", "replay", "list", "hooks")


@pytest.fixture(autouse=True)
def small():
    with registered(Small):
        yield


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def shown(words: Sequence[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Run a command that succeeds and return what it prints."""
    status = main(words)
    output, errors = capfd.readouterr()
    assert (status, errors) == (0, "")
    return output


def options(*words: str) -> dict[str, Any]:
    return parse_run(Small, words)


# Output


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(words: list[str], capfd) -> None:
    text = shown(words, capfd)
    assert all(f"loopscope {command}" in text for command in (*COMMANDS, "run EXPERIMENT", "--version"))


@pytest.mark.parametrize("help_word", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_help_fits_terminal(command: str, help_word: str, capfd) -> None:
    """Each help text starts with the usage line of its command and has at most 80 columns."""
    text = shown([command, help_word], capfd)
    assert text.startswith(f"usage: loopscope {command}")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.process
@pytest.mark.parametrize("words", [["--help"], [], ["--version"]])
def test_help_and_version_avoid_slow_imports(words: list[str]) -> None:
    script = "import sys; from loopscope.__main__ import main; main(); sys.exit(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert done.stdout.startswith(("usage: loopscope", "loopscope "))
    assert "sys" in loaded
    assert not loaded & {"torch", "numpy", "jsonargparse", "rich", "yaml", "docstring_parser", "argparse"}


def test_version_matches_project(capfd) -> None:
    version = (ROOT / "pyproject.toml").read_text().partition('version = "')[2].partition('"')[0]
    assert shown(["--version"], capfd).startswith(f"loopscope {version}, python {sys.version.split()[0]}, torch ")


def test_list_names_every_experiment_with_strategies_and_presets(capfd) -> None:
    text = shown(["list"], capfd)
    for experiment in ExperimentRegistry:
        for name in (experiment.name, *experiment.strategies, *experiment.presets):
            assert name in text


def test_hooks_command_lists_every_hook(capfd) -> None:
    """The list shows the kind, the hook points and a one-line summary of each hook."""
    text = shown(["hooks", "--all"], capfd)
    assert all(name in text for name in HookRegistry.names())
    assert all(kind in text for kind in ("observer", "intervention", "committing", "POST_EPOCH", "Clip the"))


@pytest.mark.process
def test_hook_help_shows_every_metric(capfd) -> None:
    """The help of a hook shows formula, range and reading of each of its metrics."""
    for hook in HookRegistry:
        text = " ".join(shown(["hooks", hook.name.replace("_", "-"), "--all"], capfd).split())
        for info in hook().describe_metrics():
            assert f"{hook.name}/{info.name} " in text + " "
            assert all(" ".join(words.split())[:12] in text for words in (info.formula, info.range, info.reading))


def test_help_before_an_experiment_names_the_experiments(capfd) -> None:
    assert "small" in shown(["run", "--help"], capfd)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["small", "mod_arithmetic"])
def test_run_help_fits_terminal_and_uses_dashes(name: str, width: int, capfd, monkeypatch) -> None:
    """The text has no underscored flags and no Python or Sphinx syntax."""
    monkeypatch.setenv("COLUMNS", str(width))
    text = shown(["run", name, "--help"], capfd)
    assert max(map(len, text.splitlines())) <= width
    flags = [word for word in text.split() if word.startswith("--")]
    assert not [flag for flag in flags if "_" in flag]
    assert not [word for word in ("<class", "typing", "null", "None", "[]", "default: False", "``") if word in text]


def test_run_help_shows_options_and_preset_defaults(capfd) -> None:
    text = shown(["run", "small", "--preset", "tiny", "--help"], capfd)
    for option in ("--bright", "--folder PATH", "--ratio X", "--epochs N", "--label TEXT", "--mode {fast,exact}"):
        assert option in text
    for option in ("--strategy", "--hooks", "--hook-config", "--hook-csv", "--hook-jsonl", "--with-hooks", "--silent"):
        assert option in text
    assert "(default: 0.5)" in text


def test_run_help_groups_options_common_first(capfd) -> None:
    """Every option is in the group of its subject, and a switch that is on is followed by its negation."""
    text = shown(["run", "small", "--help"], capfd)
    headings = re.findall(r"^(\S.*):\n", text, re.M)
    assert headings == [
        *("options", "Experiment and hooks", "Output and display", "Checkpoints", "Devices and processes"),
        *("Options of small, one of every type", "Rare options"),
    ]
    groups = [
        re.findall(r"^  (?:-h, )?(--[a-z-]+)", part, re.M) for part in re.split(r"^\S.*:\n", text, flags=re.M)[1:]
    ]
    first = ["--help", "--config", "--output-dir", "--save-checkpoints", "--device", "--batch-size", "--print-config"]
    assert [group[0] for group in groups] == first
    assert groups[2][groups[2].index("--hook-jsonl") + 1] == "--no-hook-jsonl"
    assert {"--traceback", "--audit-hooks", "--no-determinism"} < set(groups[-1])


# Flags, files, presets


def test_every_type_of_option_is_a_flag() -> None:
    words = "--ratio 0.5 --mode exact --folder a/b --label 3 --bright --epochs 7 --lr 1e-3"
    parsed = options(*words.split())
    expected = {
        "ratio": 0.5,
        "mode": "exact",
        "folder": Path("a/b"),
        "label": "3",
        "bright": True,
        "epochs": 7,
        "lr": 1e-3,
    }
    assert {name: parsed[name] for name in expected} == expected


@pytest.mark.parametrize(("word", "value"), [("--bright", True), ("--bright=false", False), ("--bright=yes", True)])
def test_switch_value_is_optional(word: str, value: bool) -> None:
    assert options(word)["bright"] is value


def test_null_resets_optional_option(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("ratio: 0.5")
    assert options("--config", f"{tmp_path}/a.yaml", "--ratio", "null")["ratio"] is None


@pytest.mark.longer
def test_dashes_and_underscores_are_equivalent(tmp_path: Path) -> None:
    dashed = "--batch-size 4 --with-hooks minimal --hook-csv --hook-config grad-clip.max-norm=2 --hooks grad-clip"
    underscored = dashed.replace("-", "_").replace("__", "--").replace(" _", " -")
    for words in (dashed, underscored):
        run_words = ["--strategy", "other_order", "--epochs", "1", "--overwrite", "--output-dir", str(tmp_path)]
        assert main(["run", "small", *words.split(), *run_words, "--no-console-output"]) == 0
        config = read_json(tmp_path / "small/other-order/experiment_config.json")
        assert config["config"]["batch_size"] == 4
        assert config["hooks"]["grad_clip"]["max_norm"] == 2.0


def test_repeated_lists_add_up_and_others_overwrite() -> None:
    """--hooks, --strategy and --hook-config accumulate; the last --seed is used."""
    words = "--hooks a b --strategy x --seed 1 --hooks c --hook-config h.o=1 --strategy y --seed 2"
    parsed = options(*words.split())
    assert (parsed["hooks"], parsed["strategy"], parsed["seed"]) == (["a", "b", "c"], ["x", "y"], 2)
    assert options("--hook-config", "h.o=1", "--hook-config", "h.p=2")["hook_config"] == ["h.o=1", "h.p=2"]


def test_flags_override_files_and_files_override_presets(tmp_path: Path) -> None:
    """The position of a flag does not matter, and a later file overrides an earlier one."""
    (tmp_path / "a.yaml").write_text("preset: tiny\nseed: 5\nepochs: 4\nlabel: file")
    (tmp_path / "b.yaml").write_text("seed: 6")
    parsed = options("--label", "flag", "--config", f"{tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml")
    assert [parsed[name] for name in ("lr", "epochs", "seed", "label")] == [0.5, 4, 6, "flag"]


def test_flag_list_replaces_list_from_file(tmp_path: Path) -> None:
    """Flags replace the hooks and strategies of a file, but extend its hook options."""
    (tmp_path / "a.yaml").write_text("hooks: [norms, hessian]\nstrategy: plain\nhook_config: [a.b=1]")
    words = ["--config", f"{tmp_path}/a.yaml"]
    parsed = options(*words)
    assert (parsed["hooks"], parsed["strategy"]) == (["norms", "hessian"], ["plain"])
    parsed = options(*words, "--hooks", "fourier", "--strategy", "clipped", "--hook-config", "a.b=2")
    assert (parsed["hooks"], parsed["strategy"]) == (["fourier"], ["clipped"])
    assert parsed["hook_config"] == ["a.b=1", "a.b=2"]


@pytest.mark.parametrize(
    "text",
    [
        "hook_config: [hessian.epsilon=0.5, hessian.method=exact]",
        "hook_config: {hessian.epsilon: 0.5, hessian.method: exact}",
        "hook-config:\n  hessian:\n    epsilon: 5e-1\n    method: exact",
    ],
)
def test_hook_options_may_be_list_or_mapping(text: str, tmp_path: Path) -> None:
    """A config file may contain a list, a flat mapping or a nested mapping of hook options."""
    (tmp_path / "a.yaml").write_text(text)
    parsed = options("--config", f"{tmp_path}/a.yaml")
    assert parsed["hook_config"] == ["hessian.epsilon=0.5", "hessian.method=exact"]


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert options("--config", f"{tmp_path}/a.yaml") | {"config": None} == options() | {"config": None}


def test_printed_config_reproduces_its_options(tmp_path: Path, capfd) -> None:
    """The output of --print-config is a config file that prints the same output again."""
    words = "--preset tiny --strategy plain --hooks norms hessian --hook-config hessian.epsilon=0.5 --lr 1e-5 --bright"
    text = shown(["run", "small", *words.split(), "--folder", "a b", "--print-config"], capfd)
    (tmp_path / "a.yaml").write_text(text)
    assert shown(["run", "small", "--config", f"{tmp_path}/a.yaml", "--print_config"], capfd) == text
    values = yaml.safe_load(text)
    assert (values["lr"], values["folder"], values["bright"], values["epochs"]) == (1e-5, "a b", True, 1)
    assert "config" not in values


# Options of the run


@pytest.mark.longer
def test_run_uses_requested_options_hooks_and_sinks(tmp_path: Path, capfd) -> None:
    """The test reads the recorded config, the summary and the file names in the run folder."""
    words = "--strategy plain --epochs 1 --with-hooks minimal --hooks norms hessian --hook-config hessian.epsilon=0.5"
    more = "--hook-csv --hook-jsonl --seed 7 --profile-hooks --audit-hooks --guardian-device cpu"
    shown(["run", "small", *words.split(), *more.split(), "--output-dir", str(tmp_path)], capfd)
    folder = tmp_path / "small/plain"
    config, summary = read_json(folder / "experiment_config.json"), read_json(folder / "summary.json")
    assert list(config["hooks"]) == ["training_metrics", "norms", "hessian"]
    assert config["hooks"]["hessian"]["epsilon"] == 0.5
    assert (config["config"]["seed"], summary["steps"]) == (7, STEPS_PER_EPOCH)
    assert set(summary["hook_profile"]) == {"training_metrics", "norms", "hessian"}
    assert {path.name for path in folder.iterdir()} == {
        *("experiment_config.json", "summary.json", "plain_final.pt", "plain.csv", "plain.jsonl", "alerts.jsonl"),
        *("digests.jsonl", "files.json"),
    }


@pytest.mark.longer
def test_silent_flags_reduce_or_remove_output(tmp_path: Path, capfd) -> None:
    """--silent hides the results, and --no-console-output prints nothing."""
    words = ["run", "small", "--epochs", "1", "--hooks", "norms", "--overwrite", "--output-dir", str(tmp_path)]
    normal = shown(words, capfd)
    silent = shown([*words, "--silent"], capfd)
    assert "Results:" in normal
    assert "Results:" not in silent
    assert len(silent) < len(normal)
    assert shown([*words, "--no-console-output"], capfd) == ""


@pytest.mark.slow
@pytest.mark.process
def test_script_with_duplicate_hook_is_refused(tmp_path: Path) -> None:
    """A script can start the command with a custom hook, but two hooks of one name exit with one error line."""
    script = tmp_path / "twice.py"
    script.write_text(
        "import sys\nfrom loopscope.__main__ import main\n"
        "from loopscope import HookPoint, HookRegistry, TrainingHook\n"
        "class First(TrainingHook):\n    name = 'mine'\n    hook_points = {HookPoint.POST_EPOCH}\n"
        "    compute = describe_metrics = lambda self, ctx=None: {}\n"
        "HookRegistry.register(First)\nif len(sys.argv) > 1:\n    sys.exit(main())\n"
        "HookRegistry.register(type('Second', (First,), {}))\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    run = [sys.executable, str(script)]
    done = subprocess.run([*run, "hooks", "mine"], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(run, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("loopscope: Two hooks are named 'mine': ")


@pytest.mark.slow
@pytest.mark.process
def test_unusable_plugin_hook_is_reported_once(tmp_path: Path) -> None:
    """Only a run that requests the hook is refused, and other commands still work."""
    (tmp_path / "late.py").write_text(
        "from loopscope.training_hooks.gradients import Norms\n"
        "Late = type('Late', (Norms,), {'name': 'late', 'hook_points': {'MIDNIGHT'}})\n"
    )
    metadata = tmp_path / "late-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[loopscope.hooks]\nlate = late:Late\n")
    script = "import sys; from loopscope.__main__ import main; print(main()); sys.argv[1:] = ['list']; print(main())"
    words = ["run", "mod_arithmetic", "--hooks", "late", "--no-console-output"]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", script, *words]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("2\n")
    assert done.stdout.endswith("0\n")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("loopscope: warning: The hook 'late' of late:Late cannot be used. ")
    assert all(word in done.stderr for word in ("MIDNIGHT", "POST_EPOCH"))
    assert not (tmp_path / "output").exists()
