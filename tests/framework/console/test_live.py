import io
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from loopscope import sinks, training_hooks
from loopscope.console import RunConsole
from loopscope.console.live import LiveDisplay
from loopscope.console.progress import Position
from loopscope.console.terminal import supports_full_screen
from loopscope.hooks import HookPoint
from rich.console import Console

from tests.framework.console.live_session import LIVE, metrics
from tests.framework.runs.small_experiment import session
from tests.sinks.emits import run_info

assert sinks.__all__
assert training_hooks.__all__


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.fixture
def live(tmp_path):
    with (tmp_path / "terminal").open("w", encoding="utf-8") as file:
        emitting = Emitting(file)
        yield emitting
        emitting.display.leave(lambda shown: None)


class Emitting:
    """A live display on a separate console, with a clock that the test advances."""

    def __init__(self, file):
        self.now = 0.0
        console = Console(file=file, width=80, height=24, force_terminal=True, force_interactive=True)
        assert supports_full_screen(console)
        self.display = LiveDisplay(console, LIVE, clock=lambda: self.now)
        self.sink = self.display
        self.sink.set_run_context(run_info(None))
        self.drawings = []
        draw = self.display._draw
        self.display._draw = lambda: (self.drawings.append(self.now), draw())[1]
        self.display.open()

    def emit(self, step):
        self.sink.emit(metrics(step), 0, HookPoint.POST_EPOCH, step=step)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("seconds", [1 / 1024, 1 / 16, 0.75])
def test_screen_is_drawn_at_most_twice_a_second(seconds, live):
    """The limit holds at any rate of emitted metrics."""
    for step in range(60):
        live.now += seconds
        live.emit(step)
        live.display.show(Position("step", step, 60, 1.0, {}))
    assert all(later - earlier >= 0.5 for earlier, later in pairwise(live.drawings))
    assert len(live.drawings) == pytest.approx(min(60, 60 * seconds / 0.5) + 1, abs=2)


@pytest.mark.longer
def test_slow_drawing_is_followed_by_a_long_pause(live):
    """Drawing takes about one percent of the time."""
    draw = live.display._draw

    def slow():
        draw()
        live.now += 0.1

    live.display._draw = slow
    for step in range(1000):
        live.now += 0.05
        live.emit(step)
    assert len(live.drawings) * 0.1 <= 0.011 * live.now + 0.2


def test_drawing_uses_no_random_numbers(live):
    before = generators()
    live.now += 1.0
    for step in range(5):
        live.now += 1.0
        live.emit(step)
        live.display.show(Position("step", step, 200, 1.0, {}))
    assert len(live.drawings) >= 5
    assert generators() == before


def test_failed_drawing_disables_only_the_display(live):
    """The display warns once and the board still receives metrics."""
    live.display._draw = lambda: 1 / 0
    live.now += 1.0
    with pytest.warns(UserWarning, match="The live display failed and is disabled: ZeroDivisionError"):
        live.emit(1)
    live.now += 1.0
    live.emit(2)
    assert live.display.board.step == 2


def test_printed_text_is_kept_up_to_a_limit(live):
    """The display keeps the last million characters and reports the number of omitted ones."""
    items, printed = [], io.StringIO()
    for number in range(1100):
        live.display._keep(printed, f"{number:999}\n")
    live.display.leave(items.append)
    lines = [int(line) for line in printed.getvalue().split()]
    assert lines == list(range(100, 1100))
    assert [text.plain for text in items] == ["100,000 earlier characters of output are omitted."]
    assert live.display.board.printed_lines == 1100


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("mode", ["live", "normal", "silent"])
def test_run_is_equal_with_every_display(mode, tmp_path):
    shown, bare = tmp_path / "shown", tmp_path / "bare"
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, force_interactive=True)
    times = iter(range(10**6))
    with RunConsole(mode, live_metrics=LIVE, console=console, clock=lambda: next(times)) as display:
        hooks = {"hooks": ["norms"], "strategies": ["plain", "clipped"]}
        replace(session(shown, **hooks), make_sinks=display.sinks, display=display).run()
    session(bare, strategies=["plain", "clipped"]).run()
    assert len(console.file.getvalue()) > 1000
    for strategy in ("plain", "clipped"):
        weights = [torch.load(folder / f"small/{strategy}/{strategy}_final.pt") for folder in (shown, bare)]
        assert all(map(torch.equal, weights[0].values(), weights[1].values()))
        assert weights[0].keys() == weights[1].keys()
