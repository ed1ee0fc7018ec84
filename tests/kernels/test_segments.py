from __future__ import annotations

import pytest

from layerstream.kernels.segments import HOST_WORDS_PER_TILE, WORDS, WORDS_PER_TILE, Tiling


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("run_words", [1, 3, 31, 32, 41, 656, 1024, 1152, 4096, 6144])
@pytest.mark.parametrize("words_per_tile", [WORDS_PER_TILE, HOST_WORDS_PER_TILE])
def test_tiles_are_full_and_waste_little(run_words: int, word: int, words_per_tile: int) -> None:
    tiling = Tiling.of(run_words * word, word, words_per_tile)
    assert tiling.rows * tiling.columns == words_per_tile
    covered = tiling.segments * tiling.columns
    assert covered - tiling.columns < run_words <= covered
    if run_words % 32 == 0 or run_words > 8 * 32:
        assert 8 * (covered - run_words) <= covered


@pytest.mark.parametrize(("run_bytes", "columns"), [(16384, 1024), (65536, 1024), (18432, 256), (10496, 64), (656, 64)])
def test_segments_are_as_long_as_waste_allows(run_bytes: int, columns: int) -> None:
    assert Tiling.of(run_bytes, 16).columns == columns
