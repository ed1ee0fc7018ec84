"""What a profiler recorded of a run: layerstream's ranges on host threads, and the device work queued on streams.

Two recorders, one form. Times are seconds on the recorder's own clock, on which host and device both are.

Nsight Systems, exported with `nsys export --type sqlite`. The tables and columns read here are those of NVIDIA's
"SQLite Export Schema Reference", in this form since 2021.5: `NVTX_EVENTS` (eventType 33 names a category, 59 is a
push/pop and 60 a start/end range, 75 names a domain), `StringIds`, `CUPTI_ACTIVITY_KIND_RUNTIME` (calls of the runtime
and the driver API), `CUPTI_ACTIVITY_KIND_KERNEL`, `_MEMCPY`, `_MEMSET`, and `_GRAPH_TRACE` where graphs were traced as
a whole. Tables are there only if something was recorded for them. A `globalTid` is a process's `globalPid` plus the
thread's number in the low 24 bits. Work of one CUDA graph has the `correlationId` of the call that launched the graph.

PyTorch's profiler, `export_chrome_trace`, plain or gzipped: annotations have the category `user_annotation`, calls
`cuda_runtime` or `cuda_driver`, work `kernel`, `gpu_memcpy` or `gpu_memset`, tied together by `args.correlation`; the
work of a graph has that of the graph's launch. One file is one process.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sqlite3
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerstream.errors import ConfigError
from layerstream.ranges import DOMAIN
from layerstream.timeline import Timeline, read_timeline

SQLITE_MAGIC, GZIP_MAGIC = b"SQLite format 3\0", b"\x1f\x8b"
CATEGORY, PUSHED_RANGE, STARTED_RANGE, NEW_DOMAIN = 33, 59, 60, 75
TID_BITS = 0xFFFFFF
ANNOTATION = re.compile(rf"{DOMAIN}: (step|load|save|wait) ?(.*) \[(.*), (\d+)\]")
WORK_TABLES = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
WORK_CATEGORIES, CALL_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A range of layerstream on a host thread."""

    what: str
    """step, load, save or wait."""
    label: str
    """The layer, or first..last of a group; empty for a step."""
    path: str
    payload: int | None
    """Bytes; a step's number."""
    begin: float
    end: float
    """Infinite for a range that was still open when recording ended."""
    process: Hashable
    thread: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A kernel, copy, fill or whole graph on a stream."""

    begin: float
    end: float
    queued: float
    """When the host began the call that queued it; its own begin where the call was not recorded."""
    nbytes: int
    """Of a copy; 0 for all else."""
    process: Hashable
    thread: Hashable
    """That made the call; None where it was not recorded."""
    stream: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """All of one recording."""

    marks: tuple[Mark, ...]
    work: tuple[Work, ...]


def read_trace(path: Path) -> Trace | Timeline:
    """Read a recording in any of the forms: Nsight Systems, PyTorch's profiler, or layerstream's own timeline.

    Raises:
        ConfigError: it cannot be read, or holds nothing of layerstream; the message says what to record instead.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
        if head == SQLITE_MAGIC:
            trace = _read_nsys(path)
        else:
            content = gzip.decompress(path.read_bytes()) if head[:2] == GZIP_MAGIC else path.read_bytes()
            data = json.loads(content)
            if isinstance(data, dict) and "layers" in (data.get("otherData") or {}):
                return read_timeline(path)
            trace = _read_torch(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, sqlite3.DatabaseError) as error:
        raise ConfigError(
            f"{path} is no SQLite export of Nsight Systems, no trace of PyTorch's profiler and no timeline of "
            f"layerstream ({error!r})"
        ) from error
    if not trace.marks:
        raise ConfigError(
            f"{path} holds no range of layerstream: record a step in which the connector moves blocks, with NVTX "
            "(`nsys profile --trace=cuda,nvtx`) or under PyTorch's profiler"
        )
    if not trace.work:
        raise ConfigError(
            f"{path} holds no work of a GPU: record with `--trace=cuda,nvtx`, or with ProfilerActivity.CUDA; a CPU "
            "engine has no device to record, its timelines (option trace_dir) say the same"
        )
    return trace


def _read_nsys(path: Path) -> Trace:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
        for table, option in (("NVTX_EVENTS", "nvtx"), ("CUPTI_ACTIVITY_KIND_RUNTIME", "cuda")):
            if table not in tables:
                raise ConfigError(
                    f"{path} has no table {table}: record with `nsys profile --trace=cuda,nvtx` ({option})"
                )
        strings = dict(_select(db, "StringIds", ("id", "value"))) if "StringIds" in tables else {}
        marks = tuple(_nsys_marks(db, strings))
        calls = {
            (tid & ~TID_BITS, correlation): (begin * 1e-9, tid)
            for begin, tid, correlation in _select(
                db, "CUPTI_ACTIVITY_KIND_RUNTIME", ("start", "globalTid", "correlationId")
            )
        }
        processes = {process for process, _ in calls}
        only = processes.pop() if len(processes) == 1 else None
        work: list[Work] = []
        for table in (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in WORK_TABLES):
            if table not in tables:
                continue
            columns = ("start", "end", "correlationId", "deviceId", "contextId", "streamId")
            # Filled memory is not moved.
            optional = ("globalPid", "bytes") if table.endswith("MEMCPY") else ("globalPid",)
            for begin, end, correlation, *stream, process, nbytes in (
                (*row, 0)[:8] for row in _select(db, table, columns, optional)
            ):
                owner = only if process is None else process
                queued, thread = calls.get((owner, correlation), (begin * 1e-9, None))
                work.append(
                    Work(
                        begin=begin * 1e-9,
                        end=end * 1e-9,
                        queued=queued,
                        nbytes=nbytes or 0,
                        process=owner,
                        thread=thread,
                        stream=tuple(stream),
                    )
                )
    return Trace(marks, tuple(work))


def _nsys_marks(db: sqlite3.Connection, strings: dict[int, str]) -> Iterator[Mark]:
    columns = ("eventType", "start", "globalTid")
    optional = ("end", "text", "textId", "domainId", "category", "int64Value", "uint64Value")
    domains: set[tuple[int, int]] = set()
    categories: dict[tuple[int, int, int], str] = {}
    ranges = []
    for row in _select(db, "NVTX_EVENTS", columns, optional):
        kind, begin, tid, end, text, text_id, domain, category, signed, unsigned = row
        name = text if text is not None else strings.get(text_id)
        if name is None or tid is None:
            continue
        process = tid & ~TID_BITS
        if kind == NEW_DOMAIN and name == DOMAIN:
            domains.add((process, domain))
        elif kind == CATEGORY:
            categories[process, domain, category] = name
        elif kind in {PUSHED_RANGE, STARTED_RANGE}:
            payload = signed if signed is not None else unsigned
            ranges.append((process, domain, category, name, payload, begin, end, tid))
    for process, domain, category, name, payload, begin, end, tid in ranges:
        what, _, label = name.partition(" ")
        if (process, domain) in domains and what in {"step", "load", "save", "wait"}:
            yield Mark(
                what=what,
                label=label,
                path=categories.get((process, domain, category), ""),
                payload=payload,
                begin=begin * 1e-9,
                end=math.inf if end is None else end * 1e-9,
                process=process,
                thread=tid,
            )


def _select(
    db: sqlite3.Connection, table: str, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[Any, ...]]:
    """Rows of `columns`, then of `optional`, where a column that this version does not have is None.

    Raises:
        ValueError: one of `columns` is not there.
    """
    there = {row[1] for row in db.execute(f'PRAGMA table_info("{table}")')}
    if missing := [column for column in columns if column not in there]:
        raise ValueError(f"table {table} has no column {', '.join(missing)}; an export of 2021.5 or later has")
    wanted = [f'"{column}"' if column in there else "NULL" for column in (*columns, *optional)]
    yield from db.execute(f'SELECT {", ".join(wanted)} FROM "{table}"')


def _read_torch(data: Any) -> Trace:
    events = [event for event in data["traceEvents"] if event.get("ph") == "X"]
    calls: dict[int, tuple[float, Hashable]] = {}
    marks = []
    for event in events:
        begin = float(event["ts"]) * 1e-6
        kind, thread = event.get("cat"), (event["pid"], event["tid"])
        if kind in CALL_CATEGORIES and "correlation" in event.get("args", {}):
            calls[event["args"]["correlation"]] = begin, thread
        elif kind == "user_annotation" and (match := ANNOTATION.fullmatch(event["name"])):
            what, label, path, payload = match.groups()
            marks.append(
                Mark(
                    what=what,
                    label=label,
                    path=path,
                    payload=int(payload),
                    begin=begin,
                    end=begin + float(event["dur"]) * 1e-6,
                    process=event["pid"],
                    thread=thread,
                )
            )
    owner = marks[0].process if marks else None
    work = []
    for event in events:
        if event.get("cat") in WORK_CATEGORIES:
            begin, args = float(event["ts"]) * 1e-6, event["args"]
            queued, by = calls.get(args.get("correlation"), (begin, None))
            work.append(
                Work(
                    begin=begin,
                    end=begin + float(event["dur"]) * 1e-6,
                    queued=queued,
                    nbytes=int(args.get("bytes", 0)) if event["cat"] == "gpu_memcpy" else 0,
                    process=owner,
                    thread=by,
                    stream=(args["device"], args["stream"]),
                )
            )
    return Trace(tuple(marks), tuple(work))
