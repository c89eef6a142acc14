"""``loopscope plot``: written files and error messages."""

import html
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib
import pytest
from loopscope import experiments, sinks, training_hooks
from loopscope.cli import main
from loopscope.report import Look, hook_picture
from loopscope.report.drawing import figure_of
from loopscope.report.panels import COLOURS, DASHES

from tests.docs.markdown import ROOT, code, table_with
from tests.framework.report.plotted import (
    CURVE,
    SLOPE,
    curve_record,
    describe,
    everything,
    figure,
    pixels,
    record,
    tied_record,
)
from tests.framework.runs.small_experiment import contents, session
from tests.support.processes import own_process

assert experiments.__all__
assert sinks.__all__
assert training_hooks.__all__


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two strategies, and return the folder of the experiment."""
    folder = tmp_path_factory.mktemp("finished")
    session(folder, strategies=["plain", "clipped"], hooks=["norms"], epochs=5).run()
    return folder / "small"


def plotted(*words: str | Path) -> int:
    return main(["plot", *map(str, words)])


def refused(capfd: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Run the command, check that it fails with one line and without files, and return the line."""
    before = contents(Path())
    assert plotted(*words) == 2
    output, errors = capfd.readouterr()
    assert (output, errors.count("\n"), contents(Path())) == ("", 1, before)
    return errors


def test_lists_are_omitted_with_a_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    folder = record(tmp_path, [(1, {CURVE: 1.0, "m/top": [1, 2]}), (2, {CURVE: 2.0, "m/top": [3]})])
    assert plotted(folder, "--metrics", "m/*") == 0
    assert capfd.readouterr().out == "Omitted, since the values are lists or texts: m/top.\nWrote exp_only_m.png.\n"
    assert "m/top cannot be drawn" in refused(capfd, folder, "--metrics", "m/top")


@pytest.mark.longer
def test_png_has_pixels_in_color_of_each_run(finished, tmp_path, capfd):
    path = tmp_path / "new/loss.png"
    assert plotted(finished, "--metrics", "training_metrics/loss", "--out", path) == 0
    assert capfd.readouterr().out == f"Wrote {path}.\n"
    assert [pixels(path, colour) > 500 for colour in COLOURS[:3]] == [True, True, False]


@pytest.mark.longer
def test_svg_stores_titles_labels_and_legend_as_text(finished, tmp_path):
    path = tmp_path / "loss.svg"
    assert plotted(finished, "--metrics", "training_metrics/loss", "norms/total*", "--smooth=2", "--out", path) == 0
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())
    assert {"training_metrics/loss", "norms/total_grad_norm", "epoch", "plain", "clipped"} <= set(texts)
    assert {"small", "mean of 3 points, fewer towards the ends", "as recorded"} <= set(texts)
    assert COLOURS[0].lower() in path.read_text()


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize(("suffix", "beginning"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_plot_bytes_ignore_user_matplotlib_settings(finished, tmp_path, suffix, beginning):
    """The rcParams of the user neither change the file nor are changed."""
    words = [finished / "plain", "--metrics", "norms/total_grad_norm", "--out"]
    assert plotted(*words, tmp_path / f"a.{suffix}") == 0
    with matplotlib.rc_context({"text.usetex": True, "font.size": 30, "svg.fonttype": "path", "axes.grid": False}):
        before = dict(matplotlib.rcParams)
        assert plotted(*words, tmp_path / f"b.{suffix}") == 0
        assert dict(matplotlib.rcParams) == before
    content = (tmp_path / f"a.{suffix}").read_bytes()
    assert content == (tmp_path / f"b.{suffix}").read_bytes()
    assert content.startswith(beginning)


@pytest.mark.slow
@own_process
def test_plot_overwrites_only_output_of_same_command(finished, tmp_path):
    """Different commands choose different file names; a repeated command rewrites its own file."""
    os.chdir(tmp_path)
    shutil.copytree(finished, "elsewhere/small")
    loss = ["--metrics", "training_metrics/loss"]
    commands: list[list[str | Path]] = [
        [finished, *loss],
        [finished / "plain", *loss],
        [finished / "clipped", *loss],
        ["elsewhere/small/plain", *loss],
        [finished, "elsewhere/small", *loss],
        [finished / "plain", "--metrics", "norms/total_*"],
        [finished / "plain", "--metrics", "norms/tot*"],
        [finished / "plain", "--metrics", "norms/total*"],
        [finished / "plain", "--metrics", *(f"norms/grad_norm/{name}" for name in ("0.weight", "0.bias", "1.weight"))],
        [finished / "plain", "--metrics", "**", "--overlay", "--smooth=3"],
        *([finished, *loss, word] for word in ("--log-x", "--log-y", "--linear-y", "--smooth=2", "--smooth=3")),
        *([finished, *loss, word] for word in ("--x=step", "--size=5x4", "--size=5x4.5", "--title=a", "--title=b")),
        [finished, *loss, "--format", "svg"],
        [
            finished,
            "--metrics",
            "norms/**",
            "--overlay",
            "--log-x",
            "--log-y",
            "--smooth=12345",
            "--x=step",
            "--size=5.25x5",
        ],
    ]
    for number, command in enumerate(commands, 1):
        if "--overlay" in command:
            command[0] = finished / "plain"
            command[2] = "norms/grad_norm/*"
        before = contents(Path())
        assert plotted(*command) == 0
        after = contents(Path())
        assert {name: after[name] for name in before} == before
        assert len(list(Path().iterdir())) == number + 1, command
    for command in commands:
        assert plotted(*command) == 0
    assert contents(Path()) == after


@pytest.mark.slow
def test_other_files_are_overwritten_only_with_flag(finished, tmp_path, monkeypatch, capfd):
    """A file with other content is refused without --overwrite, or another name is chosen."""
    monkeypatch.chdir(tmp_path)
    loss = [finished / "plain", "--metrics", "training_metrics/loss"]
    for name in ("mine.svg", "small_plain_loss.png", "a.pdf", "b.png"):
        Path(name).write_bytes(b"loopscope plot, my own")
    assert plotted(*loss) == 0
    (written,) = Path().glob("small_plain_loss_????????.png")
    capfd.readouterr()
    assert "mine.svg exists and this command did not draw it; use --overwrite" in refused(
        capfd, *loss, "--out", "mine.svg"
    )
    assert plotted(*loss, "--out", "mine.svg", "--overwrite") == 0
    assert plotted(*loss, "--out", "mine.svg") == 0
    capfd.readouterr()
    written.write_bytes(b"replaced")
    assert f"{written} exists and this command did not draw it" in refused(capfd, *loss)
    for name in ("a.pdf", "b.png", "mine.svg"):
        assert f"{name} exists and" in refused(capfd, *loss, "--smooth", "9", "--out", name)
    assert Path("small_plain_loss.png").read_bytes() == b"loopscope plot, my own"


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("suffix", ["png", "svg", pytest.param("pdf", marks=pytest.mark.slow)])
def test_plot_file_stores_the_command_that_drew_it(finished, tmp_path, monkeypatch, suffix):
    """This includes titles with quotes, control characters and non-ASCII text, in PNG, SVG and PDF."""
    monkeypatch.chdir(tmp_path)
    words = [finished / "plain", "--metrics", "training_metrics/loss", "--title", "d’été <$1_2$> \x1b \n(学) \\"]
    path = tmp_path / f"a.{suffix}"
    with warnings.catch_warnings(action="ignore"):
        assert plotted(*words, "--out", path) == 0
        assert plotted(*words, "--out", path) == 0
        assert plotted(*words[:3], "--out", path) == 2
        assert plotted(*words[:3], "--out", f"plain.{suffix}") == 0
    assert (
        f"loopscope plot {finished}/plain --metrics training_metrics/loss".encode()
        in Path(f"plain.{suffix}").read_bytes()
    )


@pytest.mark.longer
def test_unfinished_run_is_drawn_without_its_partial_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    folder = curve_record(Path(), SLOPE)
    with (folder / "only.jsonl").open("a") as file:
        file.write('{"epoch":0,"step":6,"hook_point":"POST_EP')
    assert plotted(folder, "--metrics", "m/loss") == 0
    assert capfd.readouterr() == ("Wrote exp_only_loss.png.\n", "")
    assert everything(folder).curves[CURVE].values.tolist() == SLOPE


@pytest.mark.longer
def test_unusual_names_are_drawn_as_literal_text(tmp_path):
    """Names with dollar signs, backslashes or markup are not parsed; control characters become question marks."""
    strategies = ["$a_1^2$", "_b\n{c}", "$x^", "\\frac{1}", "\x1b[31m", "%s {} <b>"]
    folders = []
    for number, name in enumerate(strategies):
        folder = record(tmp_path / str(number), [(1, {"m/$y_": math.nan}), (2, {"m/$y_": 2.0})])
        folders.append(folder.rename(folder.with_name(name)))
    path = tmp_path / "a.svg"
    assert plotted(*folders, "--metrics", "m/$y_", "--title", "$t_", "--out", path, "--smooth=3") == 0
    texts = {html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())}
    assert {"m/$y_", "$t_", *(re.sub("[\x1b\n]", "?", name) for name in strategies)} <= texts
    assert plotted(*folders, "--metrics", "m/$y_", "--out", tmp_path / "a.png") == 0


@pytest.mark.slow
@pytest.mark.process
def test_plot_avoids_pyplot_and_other_commands_avoid_matplotlib(finished, tmp_path):
    """Run in a subprocess without a display."""
    program = (
        "import sys; from loopscope.__main__ import PACKAGES, cli; cli.main(['list'], packages=PACKAGES);"
        "early = 'matplotlib' in sys.modules; status = cli.main(sys.argv[1:]);"
        "sys.exit(status + 10 * early + 20 * ('matplotlib.pyplot' in sys.modules))"
    )
    words = ["plot", str(finished), "--metrics", "norms/total_*", "--out", str(tmp_path / "a.png")]
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").exists()


@pytest.mark.longer
def test_repeated_folders_are_drawn_once(finished, tmp_path):
    """An experiment folder and one of its runs are given together."""
    path = tmp_path / "a.svg"
    assert plotted(finished / "plain", finished, "--metrics", "training_metrics/loss", "--out", path) == 0
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())
    assert [texts.count(name) for name in ("plain", "clipped")] == [1, 1]


@pytest.mark.longer
def test_more_than_24_panels_are_refused(tmp_path, monkeypatch, capfd):
    """The error gives the number of metrics; --overlay accepts them."""
    monkeypatch.chdir(tmp_path)
    folder = record(tmp_path, [(1, {f"m/{index}": 1.0 for index in range(25)})])
    assert "The patterns match 25 metrics, and a picture has at most 24 panels" in refused(
        capfd, folder, "--metrics", "**"
    )
    assert plotted(folder, "--metrics", "**", "--overlay") == 0
    assert len(figure(folder, patterns=["m/?", "m/1?", "m/20", "m/21", "m/22", "m/23"]).axes) == 24


def test_too_many_curves_are_refused(tmp_path, monkeypatch, capfd):
    """The limits are 28 metrics of one run, and the number of dash patterns for several runs."""
    monkeypatch.chdir(tmp_path)
    metrics = {f"m/{index}": 1.0 for index in range(29)}
    one, two = (record(tmp_path, [(1, metrics)], strategy=name) for name in ("one", "two"))
    assert "a panel can distinguish at most 28" in refused(capfd, one, "--metrics", "**", "--overlay")
    sentence = refused(capfd, one, two, "--metrics", *(f"m/{index}" for index in range(5)), "--overlay")
    assert f"{len(DASHES)} metrics by dashes, but got 2 runs and 5 metrics" in sentence


@pytest.mark.longer
def test_dollar_signs_and_leading_underscores_are_kept(tmp_path):
    """Matplotlib treats neither as a formula nor as a hidden label."""
    folders = [record(tmp_path, [(1, {"m/$x_1$": 1.0})], strategy=name) for name in ("_a", "$b$")]
    path = tmp_path / "a.svg"
    assert plotted(*folders, "--metrics", "m/$x_1$", "--out", path) == 0
    assert {"m/$x_1$", "_a", "$b$"} <= set(re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text()))


@pytest.mark.slow
def test_provenance_plot_reports_missing_clip(tmp_path, monkeypatch, capfd):
    """Without metrics of output_projection_clip the figure has three panels and a message."""
    monkeypatch.chdir(tmp_path)
    folder = tied_record(tmp_path / "tied", clip=False)
    assert plotted("--provenance", folder) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].endswith("the clip threshold: output_projection_clip recorded none in tied.")
    assert lines[1] == "Wrote support_tied_provenance.png."
    assert all(pixels(Path("support_tied_provenance.png"), COLOURS[index]) > 300 for index in (0, 1, 6))
    assert len(figure_of(hook_picture("provenance", [everything(folder)]), Look()).axes) == 3


@pytest.mark.some_rows(3)
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "needs RUN, the folder of a run"),
        (["--metrics", "a", "run/exp/only"], "needs RUN, the folder of a run"),
        (["run/exp/only"], "needs --metrics PATTERN... or --provenance; recorded metrics: m/loss."),
        (["nowhere", "--metrics", "a"], "nowhere does not exist; plot takes the folder of a run"),
        (["a-file", "--metrics", "a"], "a-file is not a folder"),
        (["empty", "--metrics", "a"], "empty is not the folder of a run"),
        (
            ["bare", "--metrics", "a"],
            "bare has neither s.jsonl nor s.csv; a run started without --no-hook-jsonl or with --hook-csv",
        ),
        (["broken", "--metrics", "a"], "broken/s.jsonl cannot be read after 1 emits (JSONDecodeError"),
        (
            ["uneven", "--metrics", "a"],
            "uneven/s.jsonl cannot be read after 0 emits (ValueError: m/a has 1 values at 2",
        ),
        (["silent", "--metrics", "a"], "There is nothing to draw: silent has no metrics yet."),
        (["headless", "--metrics", "a"], "There is nothing to draw: headless has no metrics yet."),
        (["run/exp/only", "--metrics", "los"], "No metric matches 'los'; the nearest is m/loss."),
        (
            ["run/exp/only", "--metrics", "?*"],
            "No metric matches '?*'; * does not match slashes, ** does: '?**' matches m/",
        ),
        (["run/exp/only", "--metrics", "l*"], "** does: '**/l*' matches m/loss."),
        (["run/exp/only", "--metrics", "l[o"], "No metric matches 'l[o'; the nearest is m/loss."),
        (["run/exp/only", "--metrics", "m/*", "qqq"], "No metric matches 'qqq'; recorded metrics: m/loss."),
        (["run/exp/only", "--metrics"], "--metrics needs a value."),
        (["run/exp/only", "--metrics", "m/*", "--smooth", "0"], "--smooth is 0; it must be a whole number"),
        (["run/exp/only", "--metrics", "m/*", "--smooth=few"], "--smooth is 'few'; it must be an integer."),
        (
            ["run/exp/only", "--metrics", "m/*", "--out", "a.jpg"],
            "--out is 'a.jpg'; it must end in .png or .svg or .pdf.",
        ),
        (["run/exp/only", "--metrics", "m/*", "--out", "a-file/a.png"], "a-file/a.png cannot be written: "),
        (["run/exp/only", "--metrics", "m/*", "--out", "folder.png"], "folder.png is a folder"),
        (["run/exp/only", "--metrics", "m/*", "--log-y", "--linear_y"], "--log-y and --linear-y exclude each other."),
        (["run/exp/only", "--metrics", "m/*", "--log-z"], "Unknown option '--log-z'. Did you mean '--log-"),
        (["run/exp/only", "--metrics", "m/*", "--log-x=1"], "--log-x takes no value."),
        (
            ["run/exp/only", "--metrics", "m/*", "--x", "epoch"],
            "--x epoch needs recorded ends of epochs; run/exp/only ha",
        ),
        (["run/exp/only", "--metrics", "m/*", "--x", "hour"], "Unknown value of --x: 'hour'."),
        (["run/exp/only", "--metrics", "m/*", "--format", "jpg"], "Unknown value of --format: 'jpg'."),
        (["run/exp/only", "--metrics", "m/*", "--format=svg", "--out=a.png"], "--out is 'a.png'; it must end in .svg."),
        *(
            (["run/exp/only", "--metrics", "m/*", "--size", size], f"--size is '{size}'; it must be WIDTHxHEIGHT, each")
            for size in ("4", "4x", "4x3x2", "4 x 3", "1x4", "4x41", "0x0", "4x1e1", "nanx4", "-4x3", "４x3", "infx4")
        ),
        (["run/exp/only", "--metrics", "m/*", "--out", f"{'a' * 300}.png"], "cannot be read: File name too long."),
        (["summaries/exp/only", "--metrics", "m/*"], "summaries/exp/only/summary.json cannot be read: it is not JSON"),
        (["listed/exp/only", "--metrics", "m/*"], "its field 'initial' must be an object"),
        (["run/exp/only", "--provenance", "--metrics", "a"], "draws fixed panels; remove --metrics, --overlay"),
        (["run/exp/only", "--metrics", "m/*", "--seeds"], "runs with a recorded seed; run/exp/only has"),
        (["run/exp/only", "--metrics", "m/*", "--seeds", "--smooth", "3"], "--seeds cannot be combined with --smooth"),
        (["run/exp/only", "--provenance"], "run/exp/only has no metrics of embedding_provenance or output_proj"),
    ],
)
def test_invalid_input_is_refused_without_files(words, sentence, tmp_path, monkeypatch, capfd):
    """The command prints one line that names the bad value."""
    monkeypatch.chdir(tmp_path)
    curve_record(Path("run"), SLOPE)
    for name, text in {"summaries": "{", "listed": '{"initial": [1]}'}.items():
        (curve_record(Path(name), SLOPE) / "summary.json").write_text(text)
    emit = '{"epoch":0,"step":1,"hook_point":"POST_STEP","m/a":{"steps":[1],"values":[1]}}\n'
    files = {"broken": emit + "no json\n", "uneven": emit.replace("[1]", "[1,2]", 1), "silent": ""}
    for name in ("empty", "folder.png", "bare", "headless", *files):
        Path(name).mkdir()
    for name in ("bare", "headless", *files):
        describe(Path(name), "e", "s")
        if name != "bare":
            (Path(name) / ("s.csv" if name == "headless" else "s.jsonl")).write_text(files.get(name, ""))
    Path("a-file").touch()
    assert sentence in refused(capfd, *words)


def test_missing_matplotlib_is_reported_with_install_command(finished, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'matplotlib>=" in refused(capfd, finished, "--metrics", "training_metrics/loss")


def test_plotting_page_and_help_list_same_options(capfd):
    assert plotted("--help") == 0
    help_options = set(re.findall(r"--[a-z-]+", capfd.readouterr().out)) - {"--hook-jsonl", "--hook-csv", "--help"}
    rows = [row["option of `plot`"] for row in table_with(ROOT / "docs/report.md", "option of `plot`", "meaning")]
    assert help_options == {word for row in rows for option in code(row) for word in re.findall(r"--[a-z-]+", option)}
