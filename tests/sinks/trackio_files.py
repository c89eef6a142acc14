"""Reader of Trackio's local store."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def table(store: Path, query: str, project: str = "demo") -> list[Any]:
    """Return the rows of a query to the database of a project."""
    with closing(sqlite3.connect(store / f"{project}.db")) as database:  # Python 3.13 warns about an open connection
        return database.execute(query).fetchall()


def rows_of(store: Path, project: str = "demo") -> list[tuple[str, int, dict[str, Any]]]:
    """Return run, step and values of all rows, in order."""
    rows = table(store, "SELECT run_name, step, metrics FROM metrics ORDER BY id", project)
    return [(name, step, json.loads(metrics)) for name, step, metrics in rows]
