"""A local W&B server with the requests that a client needs to send and resume a run."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HISTORY = "wandb-history.jsonl"
EVENTS = "wandb-events.jsonl"
ENTITY = "me"


@dataclass
class StoredRun:
    """The lines of a run's files, and its exit code."""

    files: dict[str, list[str]] = field(default_factory=dict)
    exit_code: int | None = None

    def write(self, request: dict[str, Any]) -> None:
        """Store the lines of a request at their offsets, replacing existing lines."""
        for name, chunk in (request.get("files") or {}).items():
            lines = self.files.setdefault(name, [])
            lines[chunk["offset"] : chunk["offset"] + len(chunk["content"])] = chunk["content"]
        self.exit_code = request.get("exitcode", self.exit_code)

    def rows(self) -> list[dict[str, Any]]:
        """Return the history without the columns that W&B adds."""
        rows = [json.loads(line) for line in self.files.get(HISTORY, [])]
        return [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]

    def steps(self) -> list[int]:
        """Return W&B's step number of each row."""
        return [json.loads(line)["_step"] for line in self.files.get(HISTORY, [])]


class WandbServer(ThreadingHTTPServer):
    """Keeps runs by their ids."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, StoredRun] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Answer a GraphQL request."""
        if operation == "Viewer":
            return {"viewer": {"id": "u", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}}
        if operation == "RunResumeStatus":
            run = self.runs.get(variables["name"])
            return {"model": {"id": "p", "name": "demo", "bucket": run and self._status(variables["name"], run)}}
        if operation == "UpsertBucket":
            inserted = variables["name"] not in self.runs
            run = self.runs.setdefault(variables["name"], StoredRun())
            bucket = {"id": "r", "name": variables["name"], "displayName": variables["displayName"]}
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": ENTITY}}
            lines = len(run.files.get(HISTORY, []))
            return {
                "upsertBucket": {
                    "bucket": {**bucket, "project": project, "historyLineCount": lines},
                    "inserted": inserted,
                }
            }
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def _status(self, name: str, run: StoredRun) -> dict[str, Any]:
        history, events = run.files.get(HISTORY, []), run.files.get(EVENTS, [])
        counts = {"historyLineCount": len(history), "eventsLineCount": len(events), "logLineCount": 0}
        tails = {"historyTail": json.dumps(history[-1:]), "eventsTail": json.dumps(events[-1:])}
        return {
            "id": "r",
            "name": name,
            **counts,
            **tails,
            "config": "{}",
            "summaryMetrics": "{}",
            "tags": [],
            "wandbConfig": json.dumps({"t": {}}),
        }


class Handler(BaseHTTPRequestHandler):
    """Handles GraphQL, line streams and uploads."""

    server: WandbServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        content: dict[str, Any] = {}
        with self.server.lock:
            if self.path == "/graphql":
                request = json.loads(body)
                content = {"data": self.server.answer(request["operationName"], request.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                self.server.runs.setdefault(self.path.split("/")[-2], StoredRun()).write(json.loads(body))
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Serve until the context ends."""
    with WandbServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
