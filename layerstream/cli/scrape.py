"""A running server's metrics: read over HTTP, and summed by name and labels."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerstream.errors import ConfigError
from layerstream.metric_table import METRICS

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

TIMEOUT_S = 10.0
MOST_BYTES = 64 << 20
"""A server's metrics are far smaller."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """A server's metrics. Values of several engines are added up unless one is named."""

    samples: tuple[Sample, ...]

    def values(self, name: str, **labels: str) -> list[tuple[Mapping[str, str], float]]:
        """(labels, value) of every series of this exported name with these labels."""
        return [
            (sample.labels, sample.value)
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of this exported name; 0 if there are none."""
        return sum(value for _, value in self.values(name, **labels))

    def ours(self, name: str, part: str = "", **labels: str) -> float:
        """`total` of one of `METRICS`; `part` is "_sum" or "_count" of a histogram."""
        return self.total(METRICS[name].exported_name + part, **labels)

    def tiers(self) -> list[str]:
        """Names of the tiers."""
        found = self.values(METRICS["tier_healthy"].exported_name)
        return list(dict.fromkeys(labels["tier"] for labels, _ in found))


def scrape(url: str) -> Scrape:
    """The metrics of the server at `url`.

    Raises:
        ConfigError: the server does not answer, or not with metrics.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ConfigError("doctor --url needs the package prometheus_client: pip install prometheus_client") from error
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"doctor --url got {url!r}; allowed: an address such as http://127.0.0.1:8000")
    address = url.rstrip("/")
    address += "" if address.endswith("/metrics") else "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as reply:
            text = reply.read(MOST_BYTES).decode("utf-8")
        families = list(text_string_to_metric_families(text))
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        why = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{address} does not answer with metrics: {why}; say the address at which `vllm serve` listens, which has "
            "metrics unless --disable-log-stats is given"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{address} does not answer with metrics of Prometheus' text format: {error}") from error
    return Scrape(tuple(sample for family in families for sample in family.samples))
