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
        # Of the 65,536 registers of a multiprocessor: seven blocks of 128 threads; a third for 256 threads beside host
        # memory.
        assert compiled.registers <= (80 if variant.form.host else 73), variant
        host_loads = {".cg"} if variant.form.host and variant.kernel == "scatter" else {""}
        host_stores = {".cs"} if variant.form.host and variant.kernel == "gather" else {""}
        assert compiled.load_cache == host_loads and compiled.store_cache == host_stores, variant
        # Page ids times the stride, in bytes or in elements: a 32-bit product would wrap.
        stride = variant.layout.page_stride
        products = re.findall(rf"\b(?:mul|mad)\.(\S+)[^;]*,\s*(?:{stride}|{stride // min(word, 8)})\b", compiled.ptx)
        assert products, variant
        assert all(kind.startswith("wide.") or kind.endswith("64") for kind in products), variant
        seen.add((variant.kernel, word, variant.layout.name, variant.form))
    assert len(seen) == 2 * (len(WORDS) * 2 * len(aot.PLAIN) + len(aot.TABLED_WORDS) * len(aot.TABLED))


def test_spills_are_seen() -> None:
    variant = next(aot.variants([90]))
    assert aot.compile_variant(variant, maxnreg=24).stack_bytes > 0


def test_report_has_a_row_for_each_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "CAPABILITIES", (90,))
    few = list(aot.variants([90]))[:2]
    monkeypatch.setattr(aot, "variants", lambda: iter(few))
    table = aot.report()
    assert table.row_count == 2
    assert [column.header for column in table.columns][:4] == ["sm", "kernel", "runs", "form"]


def test_cache_modifiers_and_widths_are_read_from_the_ptx() -> None:
    ptx = """
        @%p1 ld.global.b64 { %rd7 }, [ %rd1 + 0 ];
        @%p1 ld.global.cg.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd2 + 0 ];
        @%p1 st.global.cs.v2.b32 [ %rd3 + 0 ], { %r1, %r2 };
        @%p1 st.global.cs.v2.b32 [ %rd3 + 8 ], { %r3, %r4 };
    """
    loads, stores = aot._page_accesses(ptx)
    assert loads == {(16, ".cg")} and stores == {(8, ".cs")}
