from __future__ import annotations

import logging

import pytest

from layerstream.tiers.complaints import Complaints
from tests.rigs.tier_faults import Clock


def test_a_thousand_warnings_in_a_minute_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    complaints = Complaints(logging.getLogger("layerstream.tests"), clock=clock)
    for number in range(1000):
        complaints.warn("failure %d", number)
        clock.advance(0.03125)
    assert [record.getMessage() for record in caplog.records] == ["failure 0"]
    clock.advance(28.75)
    complaints.warn("failure %d", 1000)
    assert caplog.records[-1].getMessage() == "failure 1000 (and 999 like it since the last such line)"
    clock.advance(60)
    complaints.warn("alone")
    assert [record.getMessage() for record in caplog.records[2:]] == ["alone"]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
