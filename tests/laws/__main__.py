"""``python -m tests.laws [PATTERN ...]``: run ``loopscope check`` on the cases, and print what each shows.

``--healthy`` also tries the laws on the right trainings of the zoo and of the trainer matrix.

A case is a script with a header: ``law``, the law that it breaks or ``none``, and ``also``, laws that it breaks, too.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

CASES = Path(__file__).parent / "cases"
LIMIT = 400
"""Seconds for a case."""
SAME = {"halves_make_a_whole": "micro_batches_add_up"}
"""Laws that were one when the cases were written."""


@dataclass(frozen=True)
class Case:
    """A training, and the laws that it breaks."""

    path: Path
    law: str
    also: frozenset[str]

    @classmethod
    def read(cls, path: Path) -> "Case":
        """Read the header of a script."""
        text = path.read_text(encoding="utf-8")
        fields = dict(re.findall(r"^# (law|also): ?(.*)$", text, re.MULTILINE))
        return cls(path, fields["law"], frozenset(filter(None, map(str.strip, fields["also"].split(",")))))

    @property
    def is_healthy(self) -> bool:
        """Whether the training breaks no law."""
        return self.law == "none"

    def command(self) -> list[str]:
        """Return the command of the training."""
        text = self.path.read_text(encoding="utf-8")
        is_launched = "init_process_group" in text and "spawn" not in text
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        launcher = [torchrun, "--nproc-per-node", "2"] if is_launched else [sys.executable]
        return [*launcher, str(self.path)]

    def broken(self, folder: Path | None = None) -> dict[str, str] | None:
        """Return the laws that are found broken, with their evidence; ``None`` if no law could be tried."""
        return broken_by(self.command(), folder)

    def is_right(self, broken: dict[str, str] | None) -> bool:
        """Return whether a broken law is named, or none of a healthy training."""
        if self.is_healthy:
            return not set(broken or ()) - self.also
        return broken is not None and not {self.law, SAME.get(self.law, self.law)}.isdisjoint(broken)


def broken_by(command: Sequence[str], folder: Path | None = None) -> dict[str, str] | None:
    """Return the laws that a command breaks, with their evidence; ``None`` if no law could be tried."""
    check = [sys.executable, "-m", "loopscope", "check", "--json", "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*check, *command], capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=folder, check=False
    )
    if not result.stdout.startswith("{"):
        return None
    laws = json.loads(result.stdout)["laws"]
    return {law["law"]: law.get("evidence", "") for law in laws if law["verdict"] == "broken"}


def cases(patterns: Sequence[str] = ("*",)) -> list[Case]:
    """Return the cases whose names match a pattern."""
    paths = sorted(CASES.glob("*.py"))
    return [Case.read(path) for path in paths if any(fnmatch(path.stem, pattern) for pattern in patterns)]


def check_healthy(patterns: Sequence[str]) -> None:
    """Check all right trainings whose names match a pattern, and print those with a broken law."""
    from tests.laws.healthy import broken_by_each, right_trainings

    own = {f"case {case.path.stem}": case for case in cases() if case.is_healthy}
    chosen = [name for name in [*own, *right_trainings()] if any(fnmatch(name, pattern) for pattern in patterns)]
    others = broken_by_each([name for name in chosen if name not in own])
    counts = Counter[str]()
    for name in chosen:
        broken = own[name].broken() if name in own else next(others)
        ignored = own[name].also if name in own else ()
        alarms = [f"{law}: {evidence}" for law, evidence in (broken or {}).items() if law not in ignored]
        result = "not tried" if broken is None else "ALARM" if alarms else "right"
        counts[result] += 1
        _write(f"{result}  {name}  {'; '.join(alarms)}")
    _write(f"{counts['ALARM']} of {counts.total()} right trainings with a broken law, {counts['not tried']} not tried")


def main(words: Sequence[str]) -> None:
    """Run the cases and print a line for each."""
    patterns = [word for word in words if word != "--healthy"] or ["*"]
    if "--healthy" in words:
        return check_healthy(patterns)
    counts = {True: [0, 0], False: [0, 0]}
    for case in cases(patterns):
        broken = case.broken()
        is_right = case.is_right(broken)
        counts[case.is_healthy][0] += is_right
        counts[case.is_healthy][1] += 1
        found = "no law tried" if broken is None else ", ".join(broken) or "no law broken"
        _write(f"{'right' if is_right else 'WRONG'}  {case.path.stem}: {found}")
    _write(
        f"{counts[False][0]} of {counts[False][1]} broken laws named, {counts[True][0]} of {counts[True][1]} right "
        "trainings without a broken law"
    )
    return None


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
