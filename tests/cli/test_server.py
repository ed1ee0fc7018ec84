"""Doctor on a running server: each thing that is wrong is found, with its number and what to do, and nothing else.

The healthy server's metrics are recorded, from vLLM's CPU engine with a disk tier; others differ from it in what is
wrong with them.
"""

from __future__ import annotations

import http.server
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from layerstream.cli import app
from layerstream.cli.doctor import Finding, Level
from layerstream.cli.server import examine_server
from layerstream.errors import ConfigError
from layerstream.metric_table import METRICS, PREFIX, MetricKind

HEALTHY = (Path(__file__).parent / "scrapes" / "healthy.txt").read_text()
GIB = 1 << 30


def changed(**values: float | str) -> str:
    """The healthy server's text with other values; a name is of `METRICS`, or of vLLM after `vllm_`, and then `__` and
    values of labels, or a part of a histogram."""
    lines = HEALTHY.splitlines()
    for key, value in values.items():
        name, *labels = key.split("__")
        part = ""
        if labels and labels[0] in ("sum", "count"):
            part = f"_{labels.pop(0)}"
        if name.startswith("vllm_"):
            full = f"vllm:{name.removeprefix('vllm_')}{part}"
        else:
            full = METRICS[name].exported_name + part
        found = [
            number
            for number, line in enumerate(lines)
            if line.startswith(f"{full}{{") and all(f'="{label}"' in line for label in labels)
        ]
        if found:
            for number in found:
                lines[number] = f"{lines[number].rsplit(' ', 1)[0]} {value}"
            continue
        metric = METRICS[name]
        own = "".join(f',{label}="{text}"' for label, text in zip(metric.labels, labels, strict=True))
        lines.append(f'{full}{{engine="0",model_name="tiny"{own}}} {value}')
    return "\n".join(lines) + "\n"


@pytest.fixture
def serve() -> Iterator[Callable[[str], str]]:
    """Answers at /metrics with a text; gives the address."""
    servers: list[http.server.HTTPServer] = []

    def start(text: str, path: str = "/metrics") -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == path else 404)
                self.end_headers()
                if self.path == path:
                    self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - as the base names it

        servers.append(http.server.HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def examine(serve: Callable[[str], str]) -> Callable[..., list[Finding]]:
    """What doctor finds on a server whose metrics differ from the healthy one's."""

    def look(**values: float | str) -> list[Finding]:
        return list(examine_server(serve(changed(**values))))

    return look


def wrong(found: list[Finding]) -> list[Finding]:
    assert all(finding.fix for finding in found if finding.level is not Level.GOOD)
    return [finding for finding in found if finding.level is not Level.GOOD]


def test_a_healthy_server_has_nothing_wrong(examine: Callable[..., list[Finding]]) -> None:
    found = examine()
    assert wrong(found) == []
    assert [finding.what for finding in found] == [
        "LayerStream", "hits", "loads", "overlap", "host pool", "tier disk", "failures",
    ]  # fmt: skip


def test_the_recorded_server_had_every_metric_that_was_set_so_far() -> None:
    for metric in METRICS.values():
        if not metric.labels and metric.kind is not MetricKind.HISTOGRAM:
            assert re.search(rf"^{metric.exported_name}{{", HEALTHY, re.MULTILINE), metric.name


FAULTS: dict[str, tuple[dict[str, float | str], Level, str, str, str]] = {
    "an engine that gave up": (
        {"working": 0}, Level.BAD, "LayerStream", "off on engine 0 of 1", "restart it",
    ),
    "loads slower than recomputing": (
        {"load_seconds__sum": 8.0, "load_stall_seconds__sum": 0.0, "transfer_blocks__load": 64, "block_tokens": 16,
         "hit_tokens__host": 1024, "vllm_request_prefill_time_seconds__sum": 1.0,
         "vllm_prompt_tokens_by_source_total__local_compute": 1000},
        Level.WARN, "loads", "7,812.5 us a token loaded, 1,000.0 us a token computed: loading is 7.8 times slower",
        "bench --calibrate",
    ),
    "FULL graphs": (
        {"load_seconds__count__whole": 30, "load_seconds__count__layerwise": 10},
        Level.WARN, "overlap", "75% of loads were waited for before the forward (layerwise 10, whole 30)",
        "`require_piecewise`",
    ),
    "loads that compute cannot hide": (
        {"load_seconds__sum__layerwise": 2.0, "load_stall_seconds__sum__layerwise": 1.5,
         "load_seconds__count__layerwise": 50, "vllm_request_prefill_time_seconds__sum": 100.0},
        Level.WARN, "overlap", "25% of the time of layerwise loads was hidden, 1.50 s were not", "\"parked\"",
    ),
    "a pool too small": (
        {"evicted_chunks": 100, "returned_chunks__1.25": 10, "returned_chunks__1.5": 25, "returned_chunks__2": 5,
         "pool_bytes": 8 * GIB},
        Level.WARN, "host pool", "8.00 GiB, 100 chunks evicted; 40 of them came back",
        "too small by 4.00 GiB: 1.5 times as large it would have had 88% of them",
    ),
    "saves that found no room": (
        {"dropped_save_blocks": 50, "saved_blocks": 50},
        Level.WARN, "saves", "50 of 100 blocks were not saved", "`host_gib`",
    ),
    "a tier that is down": (
        {"tier_healthy__disk": 0, "failures__disk__read": 3, "failures__disk__late": 2},
        Level.BAD, "tier disk", "down on engine 0; failures: read 3, late 2", "it is used again once it does",
    ),
    "a tier that does not keep up": (
        {"tier_dropped_objects__disk": 90, "tier_objects__disk__write": 10},
        Level.WARN, "tier disk", "90 of 100 objects were not written", "`admission`",
    ),
    "failures": (
        {"failures__host__expired": 2, "fallen_requests": 4},
        Level.WARN, "failures", "host expired 2, 4 requests got less than a tier may have had", "log has each",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_found_with_its_number_and_what_to_do(
    examine: Callable[..., list[Finding]], name: str
) -> None:
    values, level, what, number, fix = FAULTS[name]
    found = {(finding.what, finding.level): finding for finding in wrong(examine(**values))}
    # A tier that is down has failed, too.
    assert {*found} - {("failures", Level.WARN)} <= {(what, level)}, "something else was found wrong too"
    assert number in found[what, level].value
    assert fix in found[what, level].fix


@pytest.mark.parametrize(
    "values",
    [
        {"evicted_chunks": 1000, "returned_chunks__1.25": 50},
        {"dropped_save_blocks": 1, "saved_blocks": 99},
        {"tier_dropped_objects__disk": 1, "tier_objects__disk__write": 99},
        {"load_seconds__count__whole": 4, "load_seconds__count__layerwise": 10},
    ],
    ids=str,
)
def test_a_little_of_it_is_not_wrong(examine: Callable[..., list[Finding]], values: dict[str, float | str]) -> None:
    assert wrong(examine(**values)) == []


def test_time_in_which_loads_held_up_the_model_is_not_taken_for_compute(examine: Callable[..., list[Finding]]) -> None:
    values = {**FAULTS["loads slower than recomputing"][0]}
    values |= {"load_stall_seconds__sum": 8.0, "vllm_request_prefill_time_seconds__sum": 9.0}
    found = {finding.what: finding for finding in examine(**values)}
    assert "1,000.0 us a token computed" in found["loads"].value and found["loads"].level is Level.WARN


def test_two_engines_are_added_up_and_the_one_that_is_off_is_named(serve: Callable[[str], str]) -> None:
    second = "\n".join(
        line.replace('engine="0"', 'engine="1"') for line in changed(working=0).splitlines() if 'engine="0"' in line
    )
    found = {finding.what: finding for finding in examine_server(serve(HEALTHY + second + "\n"))}
    assert "off on engine 1 of 2" in found["LayerStream"].value
    alone = {finding.what: finding for finding in examine_server(serve(HEALTHY))}
    assert found["loads"].value == alone["loads"].value, "times a token are the same of two such engines"
    tokens = [int(one["hits"].value.split()[0].replace(",", "")) for one in (alone, found)]
    assert tokens[1] == 2 * tokens[0] > 0


def test_a_server_without_the_connector_is_told_so(serve: Callable[[str], str]) -> None:
    text = "\n".join(line for line in HEALTHY.splitlines() if "layerstream" not in line) + "\n"
    (found,) = examine_server(serve(text))
    assert found.level is Level.BAD and "runs without it" in found.value and "LayerStreamConnector" in found.fix


def test_a_server_that_has_counted_nothing_is_not_called_wrong(serve: Callable[[str], str]) -> None:
    gauges = [metric.exported_name for metric in METRICS.values() if metric.kind is MetricKind.GAUGE]
    lines = [line for line in HEALTHY.splitlines() if not line.startswith(tuple(f"{name}{{" for name in gauges))]
    (found,) = examine_server(serve("\n".join(lines) + "\n"))
    assert found.level is Level.WARN and "nothing counted so far" in found.value


def test_another_program_is_told_from_vllm(serve: Callable[[str], str]) -> None:
    (found,) = examine_server(serve("# TYPE up gauge\nup 1\n"))
    assert found.level is Level.BAD and "no metric of vLLM" in found.value


def test_no_server_is_one_clear_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"{url}/metrics does not answer with metrics: .*refused.*vllm serve"):
            list(examine_server(url))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "allowed: an address such as http"),
        ("file:///etc/passwd", "allowed: an address such as http"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(examine_server(url))


@pytest.mark.parametrize("text", ["<html>no</html>", '{"error": 1}', 'vllm:x{a="1" 2'])
def test_a_page_that_is_no_metrics_is_one_clear_error(serve: Callable[[str], str], text: str) -> None:
    with pytest.raises(ConfigError, match="text format"):
        list(examine_server(serve(text)))


def test_a_server_without_metrics_is_one_clear_error(serve: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"Not Found.*--disable-log-stats"):
        list(examine_server(serve("", path="/else")))


@pytest.mark.parametrize(
    ("values", "status", "verdict"),
    [({}, 0, "The connector works on this server."), ({"working": 0}, 1, "does not work on this server as it should")],
)
def test_the_command_prints_it_and_its_status_says_whether_it_works(
    serve: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, float | str],
    status: int,
    verdict: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["layerstream", "doctor", "--url", serve(changed(**values))])
    with pytest.raises(SystemExit) as left:
        app.main()
    assert (left.value.code or 0) == status
    assert verdict in capsys.readouterr().out


def test_its_own_metrics_are_those_of_the_table() -> None:
    names = set(re.findall(rf"^({PREFIX}\w+?)(?:_bucket|_sum|_count|_created)?{{", HEALTHY, re.MULTILINE))
    assert names <= {metric.exported_name.removesuffix("_total") for metric in METRICS.values()} | {
        metric.exported_name for metric in METRICS.values()
    }
