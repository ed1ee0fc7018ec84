"""A made-up recording, written in the forms of both recorders."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

MODEL, RANGES, LAYER_COPIES, SCATTERS, SAVES = 7, "layerstream", 20, 21, 22
"""Streams of the model and of transfers, and the domain."""
NVTX_COLUMNS = (
    "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, "
    "color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, "
    "uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, "
    "floatValue REAL"
)
WORK_COLUMNS = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, graphNodeId INTEGER"
)
RUNTIME_COLUMNS = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL"
)


def ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6) + 5_000_000_000


@dataclass
class Recording:
    """Times in milliseconds. What `call` queues is device work: (kind, stream, begin, end, bytes)."""

    process: int = 41
    first_correlation: int = 100
    marks: list[tuple[str, str, str, int, float, float | None, str]] = field(default_factory=list)
    calls: list[tuple[float, list[tuple[str, int, float, float, int]]]] = field(default_factory=list)

    def step(self, number: int, begin: float, end: float | None) -> None:
        self.marks.append(("step", "", "", number, begin, end, RANGES))

    def mark(
        self,
        what: str,
        label: str,
        begin: float,
        end: float,
        *,
        path: str = "staged",
        nbytes: int = 0,
        domain: str = RANGES,
    ) -> None:
        self.marks.append((what, label, path, nbytes, begin, end, domain))

    def call(self, at: float, *work: tuple[str, int, float, float, int]) -> None:
        self.calls.append((at, list(work)))

    def kernel(self, at: float, begin: float, end: float, stream: int = MODEL) -> None:
        self.call(at, ("KERNEL", stream, begin, end, 0))

    def load(self, label: str, at: float, begin: float, end: float, *, nbytes: int = 1_000_000) -> None:
        """A load as the staged path queues it: a copy, and a scatter of the last 0.5 ms."""
        self.mark("load", label, at, at + 0.8, nbytes=nbytes)
        self.call(at + 0.1, ("MEMCPY", LAYER_COPIES, begin, end - 0.5, nbytes))
        self.call(at + 0.2, ("KERNEL", SCATTERS, end - 0.5, end, 0))


def write_nsys(path: Path, *recordings: Recording, without: tuple[str, ...] = ()) -> Path:
    tables: dict[str, list[tuple[object, ...]]] = defaultdict(list)
    texts: dict[str, int] = {}
    for recording in recordings:
        pid = recording.process << 24
        tid = pid | 77
        domains = {name: number for number, name in enumerate(dict.fromkeys(m[6] for m in recording.marks), 1)}
        for name, number in domains.items():
            tables["NVTX_EVENTS"].append((0, None, 75, tid, name, None, number, None, None))
        paths = {name: number for number, name in enumerate(dict.fromkeys(m[2] for m in recording.marks), 1) if name}
        for name, number in paths.items():
            tables["NVTX_EVENTS"].append((0, None, 33, tid, name, None, domains[RANGES], number, None))
        for what, label, path_name, payload, begin, end, domain in recording.marks:
            text = texts.setdefault(f"{what} {label}".strip(), len(texts) + 1000)
            kind = 60 if what == "step" else 59
            stop = None if end is None else ns(end)
            tables["NVTX_EVENTS"].append(
                (ns(begin), stop, kind, tid, None, text, domains[domain], paths.get(path_name), payload)
            )
        for correlation, (at, work) in enumerate(recording.calls, recording.first_correlation):
            tables["RUNTIME"].append((ns(at), ns(at + 0.01), 1, tid, correlation, 0, 0))
            for table, stream, first, last, nbytes in work:
                row = (ns(first), ns(last), 0, 1, stream, correlation, pid, 5 if len(work) > 1 else None)
                tables[table].append((*row, nbytes) if table == "MEMCPY" else row)
    with sqlite3.connect(path) as db:
        definitions = {
            "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
            "NVTX_EVENTS": NVTX_COLUMNS,
            "RUNTIME": RUNTIME_COLUMNS,
            "KERNEL": WORK_COLUMNS,
            "MEMCPY": f"{WORK_COLUMNS}, bytes INTEGER",
            "GRAPH_TRACE": WORK_COLUMNS,
        }
        for table, columns in definitions.items():
            name = table if table in {"StringIds", "NVTX_EVENTS"} else f"CUPTI_ACTIVITY_KIND_{table}"
            if table not in without and (tables[table] or table == "StringIds"):
                db.execute(f"CREATE TABLE {name} ({columns})")
                fields = "(start, end, eventType, globalTid, text, textId, domainId, category, int64Value)"
                chosen = fields if table == "NVTX_EVENTS" else ""
                for values in tables[table]:
                    db.execute(f"INSERT INTO {name} {chosen} VALUES ({', '.join('?' * len(values))})", values)
        if "StringIds" not in without:
            db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, text) for text, number in texts.items()])
    db.close()
    return path


def torch_events(recording: Recording) -> list[dict[str, object]]:
    host = {"pid": recording.process, "tid": 77, "ph": "X"}

    def span(begin: float, end: float) -> dict[str, float]:
        return {"ts": begin * 1e3 + 5e12, "dur": (end - begin) * 1e3}

    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}}
    ]
    for what, label, path, payload, begin, end, domain in recording.marks:
        assert end is not None
        name = f"{domain}: {what} {label}".rstrip() + f" [{path}, {payload}]"
        annotation = {"ph": "X", **span(begin, end), "name": name, "args": {}}
        events.append({**annotation, "cat": "gpu_user_annotation", "pid": 0, "tid": MODEL})
        events.append({**annotation, "cat": "user_annotation", "pid": recording.process, "tid": 77})
    categories = {"KERNEL": "kernel", "MEMCPY": "gpu_memcpy"}
    for number, (at, work) in enumerate(recording.calls, recording.first_correlation):
        call = {"cat": "cuda_runtime", "name": "call", "args": {"correlation": number}}
        events.append({**host, **span(at, at + 0.01), **call})
        for kind, stream, begin, end, nbytes in work:
            args: dict[str, int] = {"device": 0, "context": 1, "stream": stream, "correlation": number}
            if kind == "MEMCPY":
                args["bytes"] = nbytes
            place = {"ph": "X", "pid": 0, "tid": stream}
            events.append({**place, **span(begin, end), "cat": categories[kind], "name": "work", "args": args})
    return events


def write_torch(path: Path, recording: Recording) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": torch_events(recording)}))
    return path
