"""What is under way has what it needs and no more: slots, pins and writers of the scheduler half."""

from __future__ import annotations

from collections import Counter

from layerstream.coordinator import Coordinator
from layerstream.index import Chunk
from layerstream.jobs import JobKind


def check_books(coordinator: Coordinator) -> None:
    """
    Raises:
        AssertionError: a slot is used by nobody or by two, or a chunk is pinned or written by others than it says.
    """
    index, flights, tiering = coordinator._index, coordinator._flights, coordinator.tiering
    assert index is not None
    pins: Counter[Chunk] = Counter()
    writers: Counter[Chunk] = Counter()
    for flight in (*flights._due.values(), *flights._overdue.values()):
        (writers if flight.job.kind is JobKind.SAVE else pins).update(span.chunk for span in flight.spans)
    if tiering is not None:
        for its in tiering._flights._flights.values():
            book = writers if its.job.kind is JobKind.PROMOTE else pins
            book.update(span.chunk for spans in its.spans for span in spans)
        promotions = tiering.promotions
        wanted = {*promotions._requests.values(), *(one for _, one in promotions._leases)}
        for one in wanted:
            pins.update(span.chunk for span in one.held)
            pins.update(span.chunk for span in (one.fetch._pinned if one.fetch is not None else ()))
    chunks = {*pins, *writers, *index._heads.values()}
    assert {chunk.live for chunk in index._heads.values()} <= {True}
    assert index.used == len({chunk.slot for chunk in chunks}) == len(chunks), "slots that nobody or two use"
    assert index.pinned == sum(chunk.pins > 0 for chunk in chunks)
    for chunk in chunks:
        assert (chunk.pins, chunk.writers) == (pins[chunk], writers[chunk]), f"slot {chunk.slot}: pins, writers"


def check_tiers_idle(coordinator: Coordinator) -> None:
    """
    Raises:
        AssertionError: something of the tiers is still under way, or was not forgotten.
    """
    tiering = coordinator.tiering
    if tiering is None:
        return
    promotions, demotions, fetches = tiering.promotions, tiering.demotions, tiering.fetches
    assert not tiering._flights and not tiering.busy
    assert not (promotions._requests or promotions._served or promotions._prefixes)
    assert not fetches.owners and not +fetches.moving
    assert not (demotions._requests or demotions._saves or demotions._waiting)
    for queue in demotions.queues:
        waiting = [one.key for entry in queue._queue for one in entry.objects]
        assert not waiting or not queue._well, "a tier that is well does not get what waits for it"
        assert queue._queued == len(waiting) and queue._under_way == set(waiting)
        assert not queue._asked and not queue._taken
