"""The engine's jobs and reports, in the wrappers vLLM carries between scheduler and workers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from layerstream.jobs import RankInfo, Report, StepPlan


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, each step."""

    plan: StepPlan | None
    failed: frozenset[str] = frozenset()
    """Parked requests whose load has failed: every rank hands them on, as vLLM hears of failures from workers alone."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler, only when there is something to say: an object makes an idle step carry an output."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's report of the same step."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.report.merge(other.report))


@dataclass(slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """Workers to scheduler, once."""

    info: RankInfo
