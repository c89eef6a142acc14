"""Detectors of time that a step spends elsewhere than in the training itself."""

from collections.abc import Iterable

from .. import Evidence, Finding, History, StepTimes, Threshold, milliseconds_text
from ..detector import HooklessDetector


class WaitsForData(HooklessDetector):
    """Finds a training that spends a large part of its steps waiting for data.

    Symptom: A step takes long, or the accelerator is often idle

    The loader is slower than the model: it decodes or reads rows in the process of the training, from a slow disk, or
    starts its workers again every epoch. The time is that of the host within the loader's `next`, after the first 10
    steps. In a loop without calls of the scope and without a DataLoader it is that between two steps, on the CPU.

    Applies to: every optimizer, once the run has ended

    Source: torch.utils.data.DataLoader: num_workers, pin_memory, prefetch_factor, persistent_workers
    """

    name = "waits-for-data"
    share = Threshold(0.4, "of a step; loaders that keep up need a few percent")
    seconds = Threshold(0.002, "per step; less is not worth a change")
    steps = Threshold(50, "counted, without the first 10")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a remark if data take a large part of a step."""
        times = history.step_times
        if times is None or times.steps < self.steps:
            return
        is_seen, on_host = times.seconds["data"] > 0, times.device == "cpu"
        phase = "data" if is_seen or not on_host else "between"
        if times.share(phase) <= self.share or times.seconds[phase] <= self.seconds:
            return
        what = "waits for data" if is_seen else "passes between two steps, where this loop gets its data"
        ahead = "" if on_host else " These are times of the host, which may run ahead of the device."
        yield self.finding(
            "info",
            1,
            f"{times.share(phase):.0%} of a step, {_of_step(times, phase)}, {what}.{ahead}",
            "Load in other processes, DataLoader(..., num_workers=4, pin_memory=True, persistent_workers=True), or "
            "store the data decoded, in memory or on a faster disk.",
            Evidence(f"step_time/{phase}", times.share(phase), self.share, "below 0.05"),
            confidence=0.9 if is_seen and on_host else 0.6,
        )


class HooksTakeTime(HooklessDetector):
    """Finds a training that spends a large part of its steps in hooks.

    Symptom: The training is much slower with loopscope

    Hooks measure at more steps than needed, or one of them is expensive for this model. Hooks with a longer interval
    cost less in proportion.

    Applies to: every optimizer, once the run has ended

    Source: the clock of the run, after the first 10 steps
    """

    name = "hooks-take-time"
    share = Threshold(0.3, "of a step; the group health needs far less of a model of usual size")
    seconds = Threshold(0.01, "per step; less is not worth a change")
    steps = Threshold(200, "counted; the checks of hooks become rarer during the first ones")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a remark if hooks take a large part of a step."""
        times = history.step_times
        if times is None or times.steps < self.steps:
            return
        if times.share("hooks") > self.share and times.seconds["hooks"] > self.seconds:
            yield self.finding(
                "info",
                1,
                f"{times.share('hooks'):.0%} of a step, {_of_step(times, 'hooks')}, passes in hooks.",
                "Find the most expensive hook with profile_hooks=True (--profile-hooks), and give it a longer interval "
                'in hook_options={NAME: {"interval": 100}}, or choose with_hooks="minimal".',
                Evidence("step_time/hooks", times.share("hooks"), self.share, "below 0.1"),
            )


def _of_step(times: StepTimes, phase: str) -> str:
    return f"{milliseconds_text(times.seconds[phase])} of {milliseconds_text(times.total)}"
