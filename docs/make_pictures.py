"""Pictures of the live screen as SVG, and of the page of `make run` in a browser; run by `make pictures`.

With the folder of finished runs of `make run` as argument, only the picture of the page is taken.
"""

import shutil
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from loopscope import training_hooks  # noqa: F401 (registers the hooks)
from loopscope.cli import main as run_command
from loopscope.console.frame import frame
from loopscope.console.live import LiveDisplay
from loopscope.console.progress import Position, TrainingProgress
from loopscope.experiments.mod_arithmetic.runner import ModArithmeticConfig, ModArithmeticRunner
from loopscope.hooks import RunInfo, TrainingHook
from loopscope.runs import Display, RunOptions, Session
from loopscope.sinks.jsonl import JSONLSink
from loopscope.training import TrainingTask
from rich.console import Console
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

FOLDER = Path(__file__).with_name("pictures")
STRATEGIES = ["stride", "target"]
SHOWN_EPOCH = 130
"""The epoch of `stride` in which the picture of the live screen is taken."""
COLUMNS, LINES = 100, 30
WIDTH, HEIGHT = 1440, 900  # of the page, in pixels


class Camera(Display):
    """A display that takes a picture of the live screen instead of showing it."""

    def __init__(self, runner: ModArithmeticRunner) -> None:
        self.console = Console(record=True, force_terminal=True, width=COLUMNS, height=LINES, file=StringIO())
        self.screen = LiveDisplay(self.console, runner.live_metrics)
        self.is_done = False

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> TrainingProgress:
        """Return a progress display that tells this camera about every position."""
        steps = len(task.loader)
        return TrainingProgress(self, unit=run.loop, length=task.length, steps_per_epoch=steps, clock=monotonic)

    def show(self, position: Position) -> None:
        """Take the picture in the chosen epoch."""
        if not self.is_done and position.done >= SHOWN_EPOCH:
            self.is_done = True
            self.console.print(frame(self.screen.board, position, self.console))
            FOLDER.joinpath("live.svg").write_text(self.console.export_svg(title="loopscope run --live"), "utf-8")

    def finish(self, position: Position | None) -> None:
        """Do nothing at the end of a strategy."""


def photograph_page(page: Path) -> None:
    """Take a picture of the top of a page in Chromium."""
    options = ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    for word in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(word)
    driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
    try:
        driver.implicitly_wait(30)
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)  # a window has less room than its size
        driver.get(page.as_uri())
        driver.find_element("css selector", "#key-charts figure:last-child .main-svg")  # waits until curves are drawn
        driver.save_screenshot(str(FOLDER / "page.png"))
    finally:
        driver.quit()


def train(folder: Path) -> None:
    """Train the two strategies of `make run` in a folder, and take the picture of the live screen."""
    runner = ModArithmeticRunner(ModArithmeticConfig(**ModArithmeticRunner.presets["quick"], output_dir=folder))
    camera = Camera(runner)
    options = RunOptions(strategies=STRATEGIES, with_hooks="observers")
    Session(runner, options, lambda: [camera.screen, JSONLSink()], camera).run()


def main() -> int:
    """Take both pictures, or that of the page of finished runs."""
    with TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        if len(sys.argv) == 1:
            train(folder)
        runs = [str(folder / ModArithmeticRunner.name / strategy) for strategy in STRATEGIES]
        page = Path(temporary, "report.html")
        status = run_command(["report", *runs, "--out", str(page)])
        photograph_page(page)
    return status


if __name__ == "__main__":
    sys.exit(main())
