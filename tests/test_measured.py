from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layerstream.jobs import Report
from layerstream.measured import Measured, attended


@given(st.integers(0, 30), st.integers(0, 30))
def test_pairs_are_those_of_causal_attention(tokens: int, context: int) -> None:
    assert attended(tokens, context) == sum(context + place for place in range(1, tokens + 1))


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_a_prompt_in_parts_has_the_pairs_of_the_whole(first: int, second: int, context: int) -> None:
    assert attended(first, context) + attended(second, context + first) == attended(first + second, context)


def test_reports_of_ranks_keep_the_samples_of_both() -> None:
    one = Report(measured=Measured(steps=[(1, 2, 0.5)], loads=[("staged", 8, 0.1)]))
    two = Report(measured=Measured(steps=[(1, 2, 0.6)], saves=[("staged", 9, 0.2)]))
    both = one.merge(two).measured
    assert (both.steps, both.loads, both.saves) == (
        [(1, 2, 0.5), (1, 2, 0.6)], [("staged", 8, 0.1)], [("staged", 9, 0.2)],
    )  # fmt: skip
    assert both and not Measured()
