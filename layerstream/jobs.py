"""What crosses from the scheduler half to the worker halves and back: small, frozen, picklable.

A block is named by the id that vLLM's block pool gave it; its bytes in the host pool are named by a *pool page*: an
index over all pages of one layer, the same number on every layer and rank (`slot * chunk_blocks + position in chunk`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from layerstream.measured import Measured, StepWork
from layerstream.metrics import LoadTimes, TierTraffic, TransferStats


class JobKind(enum.IntEnum):
    """Direction of a job."""

    LOAD = 1
    """Host pool to KV cache, layer by layer, gated: the same step's attention waits for each layer."""
    PARKED_LOAD = 2
    """Host pool to KV cache for a request that is not scheduled until every rank reported the job done, or released."""
    SAVE = 3
    """KV cache to host pool."""
    PROMOTE = 4
    """Tier to host pool."""
    DEMOTE = 5
    """Host pool to tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBlocks:
    """What a job moves of one KV cache group: `block_ids[i]` pairs with the i-th page of `pool_runs` read in order."""

    block_ids: tuple[int, ...]
    """Manager block ids, each >= 0, in prefix order."""
    pool_runs: tuple[tuple[int, int], ...]
    """(first pool page, count) of consecutive pages; counts sum to `len(block_ids)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Blocks of one request to move in one direction, over all layers.

    A pool page holds the KV of a block's tokens in the layers of every KV cache group. A group whose window has passed
    the tokens has no block for them any more, and moves the rest.
    """

    job_id: int
    """Unique over the life of the scheduler half; never reused, so a late report cannot hit another job."""
    kind: JobKind
    request_id: str
    block_ids: tuple[int, ...]
    """Of the first KV cache group: see `GroupBlocks`."""
    pool_runs: tuple[tuple[int, int], ...]
    """Of the first KV cache group: see `GroupBlocks`."""
    others: tuple[GroupBlocks, ...] = ()
    """The same for the model's further KV cache groups, in their order."""
    release_after: tuple[int, int] | None = None
    """Parked loads: (layers, of how many): a rank reports the job released once that part of its own layers has
    arrived, the first ones it runs; None: the request waits for all of them."""

    def released_at(self, layers: int) -> int | None:
        """The layer (0-based) after which a rank reports the job released; None for the last, like for other jobs.

        Args:
            layers: of the rank. Pipeline stages that have fewer than the one the part was chosen for release after the
                same part of theirs, rounded up.
        """
        if self.release_after is None:
            return None
        part, whole = self.release_after
        last = -(-part * layers // whole) - 1
        return last if last < layers - 1 else None

    @property
    def groups(self) -> tuple[GroupBlocks, ...]:
        """What is moved of every KV cache group."""
        return (GroupBlocks(block_ids=self.block_ids, pool_runs=self.pool_runs), *self.others)

    @property
    def all_block_ids(self) -> tuple[int, ...]:
        """Manager block ids over all KV cache groups."""
        return (*self.block_ids, *(block for group in self.others for block in group.block_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierObject:
    """Consecutive blocks of one prefix, over all layers, as tiers keep them; every rank has an object of its own.

    Objects lie on a grid: they start at multiples of the chunk's blocks, whatever chunks of the host pool their blocks
    are in. Only a prefix's last object is shorter than a chunk.
    """

    key: bytes
    """Names the namespace and the whole prefix up to the object's last block (`layerstream.identity.object_key`)."""
    parent: bytes
    """Key of the prefix's object before it; empty for the first."""
    start: int
    """Blocks of the prefix before it, a multiple of the chunk's blocks."""
    blocks: int
    """Blocks in it, at least 1 and at most a chunk's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierJob:
    """Objects of one prefix to move between a tier and the host pool: PROMOTE or DEMOTE."""

    job_id: int
    """Unique among tier jobs over the life of the scheduler half; never reused."""
    kind: JobKind
    tier: int
    """Position of the tier in the option `tiers`."""
    namespace: bytes
    """`Namespace.digest()` of the engine."""
    chain: tuple[bytes, ...]
    """Keys of the prefix's objects before the first of `objects`: for tiers that hash prefixes themselves."""
    objects: tuple[TierObject, ...]
    """Consecutive objects of the prefix."""
    skip: int = 0
    """Leading blocks of the first object that do not go to the pool: it has them already."""
    pool_runs: tuple[tuple[int, int], ...]
    """(first pool page, count) of the objects' blocks in order, without those skipped."""
    ticket: str = ""
    """What the tier's lookup gave out for this read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAccess:
    """Blocks that a step's forward touches in the layers of one KV cache group: manager block ids, repeated where
    requests share some."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything the worker halves do for one scheduler step."""

    step: int
    jobs: tuple[Job, ...] = ()
    tier_jobs: tuple[TierJob, ...] = ()
    released: tuple[int, ...] = ()
    """Parked loads of earlier steps that some rank may not have ended, and whose blocks anyone may read by now."""
    model: tuple[ModelAccess, ...] | None = None
    """For each KV cache group; only with the option `sanitize`."""
    work: StepWork | None = None
    """What the step's forward computes, so that ranks measure it; None: they do not."""

    @property
    def gated(self) -> bool:
        """Whether this step's forward must wait for layers that are being loaded (the step's sync flag)."""
        return bool(self.released) or any(job.kind is JobKind.LOAD for job in self.jobs)


@dataclass(slots=True, kw_only=True)
class Report:
    """What worker halves say happened since the last report: counts of ranks per job.

    Reports add up: over the ranks of one step (`merge`) and, in the scheduler half, over steps until a job has been
    counted `world_size` times. Pools only grow, so of two numbers of ready slots the larger is the later one.
    """

    done: dict[int, int] = field(default_factory=dict)
    """job id -> number of ranks whose bytes are complete."""
    failed: dict[int, int] = field(default_factory=dict)
    """job id -> number of ranks that gave up; a job one rank failed has failed."""
    released: dict[int, int] = field(default_factory=dict)
    """Parked load -> number of ranks where as much has arrived as its release waits for. A rank says so once, with the
    report that the job is done at the latest."""
    ready_slots: dict[int, int] = field(default_factory=dict)
    """rank -> slots of its pool that may be used, counted from slot 0; of ranks where there are more than before."""
    moved: dict[int, tuple[int, int]] = field(default_factory=dict)
    """id of a tier job -> (number of ranks that have ended it, fewest leading objects that one of them moved)."""
    tiers: dict[int, TierTraffic] = field(default_factory=dict)
    """Position of a tier -> what was moved from and to it, and what failed."""
    stats: TransferStats = field(default_factory=TransferStats)
    measured: Measured = field(default_factory=Measured)
    """How long single forwards, loads and saves took."""
    loads: tuple[LoadTimes, ...] = ()
    """Of the loads that `stats` counts, in no order."""

    def merge(self, other: Report) -> Report:
        """Add another rank's report; returns a new one."""
        done, failed, released = dict(self.done), dict(self.failed), dict(self.released)
        for mine, theirs in ((done, other.done), (failed, other.failed), (released, other.released)):
            for job_id, count in theirs.items():
                mine[job_id] = mine.get(job_id, 0) + count
        moved = dict(self.moved)
        for job_id, (ranks, objects) in other.moved.items():
            others, fewest = moved.get(job_id, (0, objects))
            moved[job_id] = (ranks + others, min(objects, fewest))
        tiers = dict(self.tiers)
        for tier, traffic in other.tiers.items():
            tiers[tier] = traffic.merge(tiers.get(tier, TierTraffic()))
        ready = dict(self.ready_slots)
        for rank, slots in other.ready_slots.items():
            ready[rank] = max(slots, ready.get(rank, 0))
        return Report(
            done=done,
            failed=failed,
            released=released,
            ready_slots=ready,
            moved=moved,
            tiers=tiers,
            stats=self.stats.merge(other.stats),
            measured=self.measured.merge(other.measured),
            loads=self.loads + other.loads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableRank:
    """Which portable objects one rank has of each `TierObject` (`layerstream.head_groups`)."""

    digest: str
    """`HeadGroups.digest`."""
    stage: int
    """Pipeline stage."""
    count: int
    """Groups of KV heads of the whole model."""
    first: int
    """First group of this rank."""
    held: int
    """Groups of this rank."""
    block_bytes: int
    """Bytes of one block over all layers of one group."""
    header_bytes: int
    """Bytes of an object before its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What one worker half tells the scheduler half once, after its pool is set up."""

    rank: int
    """Number of the rank among those of one engine; its reports name it by the same."""
    pool_slots: int
    """Slots of its pool once all of them are ready."""
    chunk_blocks: int
    layers: int
    block_bytes: int
    """Bytes of one block over all layers of this rank."""
    pinned: bool
    device: str
    geometry: str
    """Digest of the rank's layers and pages (`layerstream.identity.canonical_digest`)."""
    attention_backend: str
    isa: str | None
    """Instruction set the pages are packed for; None on a GPU."""
    ready_slots: int | None = None
    """Slots of its pool that may be used so far, counted from slot 0; None if all may."""
    header_bytes: int = 0
    """Bytes of a tier object before its pages; 0 without tiers."""
    keeps: bool = True
    """Whether it saves, and moves objects of tiers; otherwise a rank with the same KV does, and they share a pool."""
    object_rank: int = 0
    """Number of its tier objects among those of all ranks that keep some."""
    portable: PortableRank | None = None
    """Of a rank that keeps objects, if they are portable."""
    group_bytes: tuple[int, ...] = ()
    """Bytes of one block in the layers of each KV cache group; they sum to `block_bytes`."""
    calibrated: tuple[tuple[int, float], ...] = ()
    """(Bytes over all layers, seconds) of loads that a calibration measured."""
    machine: str = ""
    """Names what computes, for rates that are kept."""
