from __future__ import annotations

import re

import pytest

from layerstream.kernels import aot
from layerstream.kernels.segments import WORDS


@pytest.mark.parametrize("capability", aot.CAPABILITIES)
def test_every_variant_uses_its_word_and_spills_nothing(capability: int) -> None:
    seen = set()
    for variant in aot.variants([capability]):
        compiled = aot.compile_variant(variant)
        word = variant.layout.alignment
        assert compiled.loads == compiled.stores == {word}, variant
        assert compiled.stack_bytes == 0 and compiled.shared_bytes == 0, variant
        # Seven blocks of 128 threads in the 65,536 registers of a multiprocessor.
        assert compiled.registers <= 73, variant
        # Page ids times the stride, in bytes or in elements: a 32-bit product would wrap.
        stride = variant.layout.page_stride
        products = re.findall(rf"\b(?:mul|mad)\.(\S+)[^;]*,\s*(?:{stride}|{stride // min(word, 8)})\b", compiled.ptx)
        assert products, variant
        assert all(kind.startswith("wide.") or kind.endswith("64") for kind in products), variant
        seen.add((variant.kernel, word, variant.layout.name, variant.counted))
    assert len(seen) == 2 * len(WORDS) * 2 * 2


def test_spills_are_seen() -> None:
    variant = next(aot.variants([90]))
    assert aot.compile_variant(variant, maxnreg=24).stack_bytes > 0


def test_report_has_a_row_for_each_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "CAPABILITIES", (90,))
    few = list(aot.variants([90]))[:2]
    monkeypatch.setattr(aot, "variants", lambda: iter(few))
    table = aot.report()
    assert table.row_count == 2
    assert [column.header for column in table.columns][:3] == ["sm", "kernel", "runs"]
