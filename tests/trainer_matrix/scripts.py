"""Command that trains rows of the matrix as scripts without loopscope, which ``loopscope watch`` can start.

``python -m tests.trainer_matrix.scripts FOLDER JOBS NAME ...`` trains each row in a folder with its position, and
writes the results of its ranks to ``results.json`` there.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.trainer_matrix.outcome import trainings
from tests.trainer_matrix.table import ROWS


def main(arguments: Sequence[str]) -> int:
    """Train the rows."""
    root, jobs, *names = arguments

    def train(place: int) -> None:
        folder = Path(root, str(place))
        results = trainings(ROWS[names[place]], folder, "script")
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")

    with ThreadPoolExecutor(int(jobs)) as pool:
        list(pool.map(train, range(len(names))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
