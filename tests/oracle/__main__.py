"""Command of ``make oracle``: records the behaviour, compares it with the stored record, or updates the record.

A later oracle also records the tree of this one with ``record --out FILE PART...``, run in the folder of a tree, so its
words and the form of the file stay unchanged.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.oracle import compare, environment, trees
from tests.oracle.storage import Storage
from tests.oracle.worker import PARTS, record

HERE = Path(__file__).parents[2]


def main() -> int:
    """Run the command and return its exit status: 1 if behaviour differs, 2 if it cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description="record, compare or update")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("compare", "update", "record"):
        command = commands.add_parser(name)
        command.add_argument("parts", nargs="*", metavar="PART", help=f"by default all: {', '.join(PARTS)}")
        if name == "record":
            command.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.parts} - {*PARTS}):
        parser.error(f"{unknown[0]!r} is not a part; the parts are {', '.join(PARTS)}")
    parts = [part for part in PARTS if part in (arguments.parts or PARTS)]
    environment.fix()
    if arguments.command == "record":
        arguments.out.write_text(json.dumps(record(parts, Path.cwd())), "utf-8")
        return 0
    try:
        return update(HERE, parts) if arguments.command == "update" else compared(HERE, parts)
    except trees.OracleError as error:
        sys.stderr.write(f"oracle: {error}\n")
        return 2


def compared(tree: Path, parts: list[str]) -> int:
    """Record a tree, print the differences from its stored record, and return the exit status."""
    storage = Storage(tree)
    names = {part: environment.name_of(part) for part in PARTS}
    complete(storage, parts, names)
    now = trees.record_of(tree, parts)
    differing = [
        difference
        for part in parts
        for difference in compare.differences(part, storage.record(part, names[part]), now[part])
    ]
    if differing:
        sys.stdout.write("\n".join(compare.report(differing)) + "\n")
    return 1 if differing else 0


def complete(storage: Storage, parts: list[str], names: dict[str, str]) -> None:
    """Store the missing digests of this environment: recorded from the reference, never from the current code."""
    missing = [part for part in parts if part != compare.HELP and storage.digests(part, names[part]) is None]
    if not missing:
        return
    commit = trees.reference_commit(storage.tree)
    sys.stderr.write(f"oracle: no digests of this environment; recording {' '.join(missing)} of {commit[:12]} first\n")
    with trees.work_tree(storage.tree, commit) as reference:
        storage.add_environment(trees.record_of(reference, missing), names)


def update(tree: Path, parts: list[str]) -> int:
    """Store the behaviour of a tree as the reference, if everything is committed, and return the exit status."""
    if changed := trees.uncommitted(tree):
        raise trees.NoReferenceError(
            f"{changed[0]} is not committed; commit the intended change first, then run make oracle-update and commit "
            "its files separately, with the reason."
        )
    now: dict[str, Any] = trees.record_of(tree, parts)
    if not Storage(tree).update(now, {part: environment.name_of(part) for part in PARTS}):
        sys.stdout.write("oracle: nothing differs from what is stored\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
