"""Invalid input: one sentence on standard error with the value and the accepted ones, status 2, no files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from loopscope import experiments, training_hooks
from loopscope.cli import main
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, HookRegistry, InterventionHook, StatePart, TrainingHook

from tests.framework.runs.small_experiment import Small, SmallConfig, contents, registered

assert experiments.__all__
assert training_hooks.__all__


class Refuser(TrainingHook):
    """Refuses every model when it starts."""

    name = "refuser"
    hook_points = {HookPoint.POST_EPOCH}

    def start(self, run: Any) -> None:
        raise UsageError("This hook needs a model with attention; small has none.")

    def compute(self, ctx: Any) -> dict[str, float]:
        return {}

    def describe_metrics(self) -> list[Any]:
        return []


class Undeclared(InterventionHook):
    """Scales gradients without declaring it."""

    name = "undeclared"
    hook_points = {HookPoint.POST_BACKWARD}

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, float]:
        model_ctx.scale_gradients(0.5)
        return {}

    def describe_metrics(self) -> list[Any]:
        return []


class OddGroups(Small):
    """An experiment without the usual groups."""

    name = "odd_groups"

    @property
    def hook_sets(self) -> dict[str, Sequence[str]]:
        return {"none": [], "weights": ["norms"]}


class CommittingGroup(Small):
    """An experiment with a group that contains a committing hook."""

    name = "committing_group"

    @property
    def hook_sets(self) -> dict[str, Sequence[str]]:
        return {"none": [], "clipping": ["grad_clip"]}


@pytest.fixture(autouse=True)
def entries():
    with registered(Small, OddGroups, CommittingGroup, Refuser, Undeclared):
        yield


def refused(words: Sequence[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Run the command, check the common properties of refusals, and return the sentence."""
    before = contents(folder)
    status = main(words)
    output, errors = capfd.readouterr()
    assert status == 2
    assert output == ""
    assert errors.startswith("loopscope: ")
    assert errors.endswith(".\n")
    assert errors.count("\n") == 1
    assert "Traceback" not in errors
    assert contents(folder) == before
    return errors


COMMANDS = [
    (["runn"], ["'runn'", "Did you mean 'run'?"]),
    (["--verison"], ["'--verison'"]),
    (["list", "more"], ["'more'"]),
    (["list", "--more"], ["'--more'"]),
    (["resume", "--silnt", "run"], ["'--silnt'"]),
    (["run", "small", "--help=3"], ["--help takes no value"]),
    (["hooks", "norm"], ["'norm'", "Did you mean 'norms'?"]),
    (["hooks", "norms", "fourier"], ["'fourier'"]),
    (["run"], ["needs an experiment", "mod_arithmetic", "small"]),
    (["run", "--preset", "quick"], ["needs an experiment"]),
    (["run", "smal"], ["'smal'", "Did you mean 'small'?"]),
]


@pytest.mark.parametrize(("words", "fragments"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_invalid_command_is_refused(words: list[str], fragments: list[str], tmp_path: Path, capfd) -> None:
    sentence = refused(words, tmp_path, capfd)
    assert all(fragment in sentence for fragment in fragments)


OPTIONS = [
    ("--lrr 3", ["'--lrr'", "Did you mean '--lr'?"]),
    ("--epoch 3", ["'--epoch'", "Did you mean '--epochs'?"]),
    ("--lrr=3", ["'--lrr'", "Did you mean '--lr'?"]),
    ("-x", ["'-x'", "--help"]),
    ("--strategy plane", ["'plane'", "Did you mean 'plain'?", "other-order"]),
    ("--preset tinny", ["'tinny'", "Did you mean 'tiny'?"]),
    ("--hooks norm", ["'norm'", "Did you mean 'norms'?"]),
    ("--hooks observer", ["'observer'", "Did you mean 'observers'?"]),
    ("--with-hooks minimum", ["'minimum'", "Did you mean 'minimal'?"]),
    ("--seed x", ["--seed", "'x'", "an integer"]),
    ("--seed 2.5", ["--seed", "'2.5'", "an integer"]),
    ("--seed -1", ["seed is -1", "0..2**63-1"]),
    ("--lr fast", ["--lr", "'fast'", "a number"]),
    ("--budget fast", ["budget is 'fast'", "such as 0.05 or 5%, none"]),
    ("--lr -1e-3", ["lr is -0.001", "greater than 0"]),
    ("--lr nan", ["lr", "nan"]),
    ("--lr inf", ["lr", "inf"]),
    ("--ratio half", ["--ratio", "'half'", "a number or null"]),
    ("--mode quick", ["--mode", "'quick'", "exact, fast"]),
    ("--bright perhaps", ["--bright", "'perhaps'", "true or false"]),
    ("--overwrite=perhaps", ["--overwrite", "'perhaps'", "true or false"]),
    ("--optimizer adamx", ["'adamx'", "Did you mean 'adam'?", "sgd"]),
    ("--target-acc 99.5", ["target_acc is 99.5", "0.995"]),
    ("--on-hook-error skp", ["'skp'", "Did you mean 'skip'?", "raise"]),
    ("--live --silent", ["--live and --silent exclude each other", "--no-console-output"]),
    ("--silent --no-console-output --live", ["--live and --silent and --no-console-output exclude each other"]),
    ("--device gpu", ["'gpu'", "cpu"]),
    ("--device meta", ["'meta'", "cpu"]),
    ("--device cpu:x", ["'cpu:x'", "cpu"]),
    ("--guardian-device gpu", ["'gpu'", "cpu"]),
    ("--epochs", ["--epochs needs a value"]),
    ("--hooks", ["--hooks needs a value"]),
    ("--config", ["--config needs a value"]),
    ("--preset", ["--preset needs a value"]),
    ("--hooks fourier --hook-config fourier", ["'fourier'", "hook.option=value"]),
    ("--hooks fourier --hook-config fourier=3", ["'fourier=3'", "hook.option=value"]),
    ("--hook-config furrier.top_k=3", ["'furrier'", "Did you mean 'fourier'?"]),
    ("--hook-config fourier.top_k=3", ["'fourier'", "not enabled", "--hooks fourier"]),
    ("--hooks fourier --hook-config fourier.topk=3", ["'topk'", "Did you mean 'top_k'?"]),
    ("--hooks fourier --hook-config fourier.top_k=x", ["fourier.top_k", "'x'", "an integer"]),
    ("--hooks fourier --hook-config fourier.top_k=0", ["'fourier'", "top_k is 0", "at least 1"]),
    ("--hooks hessian --hook-config hessian.method=exat", ["'exat'", "Did you mean 'exact'?"]),
    ("--hooks hessian --hook-config hessian.burst_length=0", ["burst_length is 0"]),
    ("--hooks refuser", ["needs a model with attention"]),
    ("--hooks norms refuser --on-hook-error skip", ["needs a model with attention"]),
    ("--hooks fourier", ["nn.Embedding"]),
]


@pytest.mark.some_rows(3)
@pytest.mark.parametrize(("words", "fragments"), OPTIONS, ids=[words for words, _ in OPTIONS])
def test_invalid_option_is_refused(words: str, fragments: list[str], tmp_path: Path, capfd) -> None:
    sentence = refused(["run", "small", "--output-dir", f"{tmp_path}/out", *words.split()], tmp_path, capfd)
    assert all(fragment in sentence for fragment in fragments)


FILES: list[tuple[str | bytes, list[str]]] = [
    ("lrr: 3", ["'lrr'", "Did you mean 'lr'?", "bad.yaml"]),
    ("target-ac: 0.5", ["'target-ac'", "Did you mean 'target_acc'?"]),
    ("config: other.yaml", ["'config'", "bad.yaml"]),
    ("help: true", ["'help'"]),
    ("3: 4", ["'3'"]),
    ("seed: x", ["--seed", "bad.yaml", "'x'", "an integer"]),
    ("seed: 2.0", ["--seed", "'2.0'", "an integer"]),
    ("seed: true", ["--seed", "'True'", "an integer"]),
    ("seed: null", ["seed is None", "an integer"]),
    ("lr: .nan", ["lr", "nan"]),
    ("mode: slow", ["--mode", "'slow'", "exact, fast"]),
    ("overwrite: 3", ["--overwrite", "'3'", "true or false"]),
    ("hook_csv: 3", ["--hook-csv", "'3'", "true or false"]),
    ("output_dir: 3", ["--output-dir", "bad.yaml"]),
    ("preset: tinny", ["'tinny'", "Did you mean 'tiny'?"]),
    ("preset: 3", ["'3'", "tiny"]),
    ("strategy: plane", ["'plane'", "Did you mean 'plain'?"]),
    ("strategy: {plain: 3}", ["strategy", "a name or a list of names"]),
    ("hooks: [3]", ["hooks", "[3]", "a list of names"]),
    ("with_hooks: 3", ["--with-hooks", "'3'", "text"]),
    ("hook_config: {fourier: {topk: 3}}\nhooks: fourier", ["'topk'", "Did you mean 'top_k'?"]),
    ("hook_config: {fourier: 3}\nhooks: fourier", ["'fourier=3'", "hook.option=value"]),
    ("hook_config: 3", ["--hook-config", "bad.yaml", "'3'", "a list of names"]),
    ("p: [1\n : {", ["bad.yaml", "not YAML", "line 1"]),
    ("[" * 5000, ["bad.yaml", "not YAML"]),
    ("just words", ["bad.yaml", "'just words'", "mapping"]),
    ("- a\n- b", ["bad.yaml", "mapping"]),
    (b"\xff\xfe\x00", ["bad.yaml", "UTF-8"]),
    ("preset: [tiny]", ["'tiny'", "Known: tiny"]),
]  # fmt: skip


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("text", ["top secret " * 9, "- top secret\n" * 9, "secret: 1\n" * 1000, "a: {b: [\n" * 50])
def test_refusal_quotes_little_of_an_invalid_config(text: str, tmp_path: Path, capfd) -> None:
    """The message for a file that is not a config is short and repeats hardly any of its content."""
    (tmp_path / "invalid").write_text(text)
    sentence = refused(["run", "small", "--config", f"{tmp_path}/invalid"], tmp_path, capfd)
    assert len(sentence) < 300 + len(str(tmp_path))
    assert sentence.count("secret") < 3


WORDS = [["{x}"], ["run", "{x}"], ["run", "small", "--{x}"], ["resume", "{x}"], ["diff", "{x}", "{x}"], ["plot", "{x}"],
         ["hooks", "{x}"], ["run", "small", "--preset", "{x}"], ["run", "small", "--config", "{x}"]]  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_error_messages_have_no_control_codes(words: list[str], tmp_path: Path, capfd) -> None:
    sentence = refused([word.format(x="\x1b[31m\x07\x9b") for word in words], tmp_path, capfd)
    assert sentence.rstrip("\n").isprintable()


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize(("text", "fragments"), FILES, ids=[repr(text[:40]) for text, _ in FILES])
def test_invalid_config_file_is_refused(text: str | bytes, fragments: list[str], tmp_path: Path, capfd) -> None:
    """A config file with invalid content is refused in one line."""
    file = tmp_path / "bad.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    words = ["run", "small", "--output-dir", f"{tmp_path}/out", "--config", str(file)]
    sentence = refused(words, tmp_path, capfd)
    assert all(fragment in sentence for fragment in fragments)


@pytest.mark.parametrize("name", ["missing.yaml", "folder"])
def test_unreadable_config_file_is_refused(name: str, tmp_path: Path, capfd) -> None:
    """The message names a missing file or a folder given as the config."""
    (tmp_path / "folder").mkdir()
    assert name in refused(["run", "small", "--config", f"{tmp_path}/{name}"], tmp_path, capfd)


def test_file_with_the_bad_value_is_named(tmp_path: Path, capfd) -> None:
    """With several config files, the message names the one with the bad value."""
    for name, text in (("a.yaml", "seed: 1"), ("b.yaml", "lr: fast"), ("c.yaml", "lr: 0.1")):
        (tmp_path / name).write_text(text)
    files = [word for name in "abc" for word in ("--config", f"{tmp_path}/{name}.yaml")]
    assert f"--lr in the config file {tmp_path}/b.yaml is 'fast'" in refused(["run", "small", *files], tmp_path, capfd)


@pytest.mark.longer
def test_option_without_default_is_required(tmp_path: Path, capfd) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Sized(SmallConfig):
        width: int

    class Needy(Small):
        name = "needy"
        config_class = Sized

    with registered(Needy):
        assert "loopscope run needy needs --width." in refused(["run", "needy"], tmp_path, capfd)
        assert main(["run", "needy", "--width", "3", "--print-config"]) == 0
        assert "width: 3\n" in capfd.readouterr().out


P = [("1", "p is 1"), ("0", "p is 0"), ("-3", "p is -3"), ("2.5", "'2.5'"), ("abc", "'abc'"), ("", "''")]


@pytest.mark.parametrize(("p", "fragment"), P)
def test_modulus_must_be_an_integer_above_one(p: str, fragment: str, tmp_path: Path, capfd) -> None:
    """Other values of --p are refused with a message that asks for an integer."""
    words = ["run", "mod_arithmetic", "--output-dir", f"{tmp_path}/out", "--p", p]
    sentence = refused(words, tmp_path, capfd)
    assert fragment in sentence
    assert "integer" in sentence


MOD_ARITHMETIC = [
    ("--p 5 --train-size 20 --test-size 6", ["26 pairs", "only 25", "p = 5"]),
    ("--train-size 0", ["train_size is 0"]),
    ("--test-size -1", ["test_size is -1"]),
    ("--embed-dim 10 --num-heads 4", ["embed_dim is 10", "multiple of num_heads (4)"]),
    ("--stride 0", ["stride is 0"]),
    ("--layers 0", ["layers is 0"]),
]


@pytest.mark.parametrize(("words", "fragments"), MOD_ARITHMETIC, ids=[words for words, _ in MOD_ARITHMETIC])
def test_inconsistent_sizes_are_refused(words: str, fragments: list[str], tmp_path: Path, capfd) -> None:
    sentence = refused(["run", "mod_arithmetic", "--output-dir", f"{tmp_path}/out", *words.split()], tmp_path, capfd)
    assert all(fragment in sentence for fragment in fragments)


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/none", "/dev/null", "x" * 300])
def test_unwritable_output_directory_is_refused(where: str, tmp_path: Path, capfd) -> None:
    """The message names the directory and states that it is not writable."""
    (tmp_path / "file").write_text("precious")
    sentence = refused(["run", "small", "--output-dir", str(tmp_path / where)], tmp_path, capfd)
    assert where in sentence
    assert "cannot be written" in sentence


@pytest.mark.longer
def test_finished_run_is_refused_unless_overwritten(tmp_path: Path, capfd) -> None:
    """Without --overwrite no file changes; with it, the old checkpoints are removed."""
    words = ["run", "small", "--output-dir", str(tmp_path), "--strategy", "plain", "--hooks", "norms", "--hook-csv"]
    assert main([*words, "--save-checkpoints", "1", "--no-console-output"]) == 0
    capfd.readouterr()
    sentence = refused([*words, "--seed", "1"], tmp_path, capfd)
    assert f"{tmp_path}/small/plain already holds a finished run" in sentence
    assert "--overwrite" in sentence
    assert main([*words, "--seed", "1", "--overwrite", "--no-console-output"]) == 0
    assert '"seed": 1' in (tmp_path / "small/plain/summary.json").read_text()
    assert not (tmp_path / "small/plain/checkpoints").exists()


@pytest.mark.longer
def test_one_finished_strategy_refuses_all(tmp_path: Path, capfd) -> None:
    words = ["run", "small", "--output-dir", str(tmp_path), "--epochs", "1"]
    assert main([*words, "--strategy", "other-order", "--no-console-output"]) == 0
    capfd.readouterr()
    assert "other-order already holds" in refused([*words, "--strategy", "plain", "other-order"], tmp_path, capfd)


@pytest.mark.longer
@pytest.mark.guarantee("mistakes-are-refused-early")
def test_hook_refusal_preserves_run_to_be_overwritten(tmp_path: Path, capfd) -> None:
    """With --overwrite, no file is lost if a hook refuses the run when it starts."""
    words = ["run", "small", "--output-dir", str(tmp_path), "--strategy", "plain", "--hook-csv"]
    assert main([*words, "--hooks", "norms", "--no-console-output"]) == 0
    capfd.readouterr()
    refused([*words, "--hooks", "norms", "refuser", "--overwrite"], tmp_path, capfd)


def test_unknown_hook_group_is_refused(tmp_path: Path, capfd) -> None:
    """The message names the experiment, the group and the groups that exist."""
    sentence = refused(["run", "odd_groups", "--with-hooks", "observers"], tmp_path, capfd)
    assert all(fragment in sentence for fragment in ("'odd_groups'", "'observers'", "none, weights"))


def test_group_with_committing_hook_is_refused(tmp_path: Path, capfd) -> None:
    sentence = refused(["run", "committing_group", "--with-hooks", "clipping"], tmp_path, capfd)
    assert "grad_clip" in sentence


def test_two_hooks_of_one_name_are_refused(tmp_path: Path, capfd, monkeypatch) -> None:
    (tmp_path / "second_norms.py").write_text(
        "from loopscope import HookRegistry\nfrom tests.framework.cli.test_cli_bad_input import Refuser\n"
        "HookRegistry.register(type('Another', (Refuser,), {'name': 'norms'}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert refused_import("second_norms", capfd).startswith("loopscope: Two hooks are named 'norms': ")


def test_hook_with_unknown_hook_point_is_refused(tmp_path: Path, capfd, monkeypatch) -> None:
    """The message names the point and the valid ones, and the hook is not registered."""
    (tmp_path / "at_midnight.py").write_text(
        "from loopscope import HookRegistry\nfrom tests.framework.cli.test_cli_bad_input import Refuser\n"
        "HookRegistry.register(type('Late', (Refuser,), {'name': 'late', 'hook_points': {'MIDNIGHT'}}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sentence = refused_import("at_midnight", capfd)
    assert "MIDNIGHT" in sentence
    assert "POST_EPOCH" in sentence
    assert "late" not in HookRegistry.names()


def refused_import(package: str, capfd) -> str:
    """Run ``loopscope list`` with a package whose registration is refused; return the error."""
    assert main(["list"], packages=[package]) == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    return errors


@pytest.mark.longer
@pytest.mark.guarantee("commits-are-declared")
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_undeclared_commit_ends_the_run(on_error, tmp_path, capfd) -> None:
    """The command exits with status 2 and one line that gives the missing declaration, even with skip."""
    words = ["run", "small", "--output-dir", str(tmp_path), "--strategy", "plain", "--hooks", "undeclared"]
    with registered(Undeclared):
        status = main([*words, "--on-hook-error", on_error, "--no-console-output"])
    output, errors = capfd.readouterr()
    assert (status, output, errors.count("\n")) == (2, "", 1)
    assert "scale_gradients changes the gradients, which hook 'undeclared' does not declare" in errors
    assert "commits = {StatePart.GRADIENTS}" in errors
    assert '"status": "failed"' in (tmp_path / "small/plain/summary.json").read_text()
    assert not (tmp_path / "small/plain/checkpoints").exists()  # no checkpoint within a step


@pytest.mark.longer
def test_declared_commit_is_accepted(tmp_path: Path) -> None:
    """A hook that declares its commits runs to the end."""
    with registered(type("Declared", (Undeclared,), {"name": "declared", "commits": {StatePart.GRADIENTS}})):
        words = ["run", "small", "--output-dir", str(tmp_path), "--strategy", "plain", "--hooks", "declared"]
        assert main([*words, "--no-console-output"]) == 0


@pytest.mark.longer
def test_small_experiment_runs(tmp_path: Path) -> None:
    assert main(["run", "small", "--output-dir", str(tmp_path), "--no-console-output"]) == 0
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == ["clipped", "other-order", "plain"]
