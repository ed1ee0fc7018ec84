from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from layerstream.errors import ObjectError
from layerstream.tiers.base import Item
from layerstream.tiers.objects import ObjectFormat, checksum, parse_header
from tests.rigs.tier_items import NAMESPACE, Room, empty_item, fill, intact, make_chain, make_format

FORM = make_format((512, 40, 1000), rank=3)
CHAIN = make_chain(2, tail=3)


def item(number: int = 1, **shape: Any) -> Item:
    return fill(FORM, empty_item(FORM, CHAIN[number], Room(1 << 20), **shape))


def whole(each: Item) -> bytes:
    return b"".join(piece.tobytes() for piece in each.buffers)


def check(each: Item, **other: Any) -> None:
    FORM.check(replace(each.object, **other), each.header, each.layers, namespace=NAMESPACE)


def test_an_object_is_a_safetensors_file_like_any_other() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    for number, each in enumerate(CHAIN):
        tensors = safetensors.load(whole(item(number)))
        assert sorted(tensors) == sorted(FORM.layers)
        for name, size, pieces in zip(FORM.layers, FORM.page_bytes, item(number).layers, strict=True):
            assert tensors[name].dtype == np.uint8 and tensors[name].shape == (each.blocks, size)
            assert tensors[name].tobytes() == b"".join(piece.tobytes() for piece in pieces)


def test_a_header_says_what_it_was_written_for() -> None:
    for number, each in enumerate(CHAIN):
        header = parse_header(item(number).header.data)
        assert (header.key, header.parent, header.namespace) == (each.key.hex(), each.parent.hex(), NAMESPACE.hex())
        assert (header.start, header.blocks, header.tokens, header.rank) == (
            each.start, each.blocks, each.blocks * FORM.block_tokens, 3,
        )  # fmt: skip
        assert (header.layers, header.page_bytes) == (FORM.layers, FORM.page_bytes)
        assert header.header_bytes == FORM.header_bytes and header.nbytes == FORM.nbytes(each.blocks)
        assert header.checksums == tuple(checksum(pieces) for pieces in item(number).layers)


@given(
    st.lists(st.integers(1, 1 << 20), min_size=1, max_size=130),
    st.integers(1, 4096),
    st.integers(0, 10**10 - 1),
    st.integers(0, 10**6),
)
def test_every_header_of_an_engine_has_the_same_length(
    page_bytes: list[int], chunk_blocks: int, start: int, rank: int
) -> None:
    form = make_format(page_bytes, chunk_blocks=chunk_blocks, rank=rank)
    assert form.header_bytes % 4096 == 0
    for blocks in {1, chunk_blocks}:
        each = replace(CHAIN[1], start=start, blocks=blocks)
        out = np.zeros(form.header_bytes, dtype=np.uint8)
        form.write_header(out, each, namespace=NAMESPACE, checksums=[(1 << 64) - 1] * len(page_bytes))
        header = parse_header(out.data)
        assert (header.blocks, header.start, header.header_bytes) == (blocks, start, form.header_bytes)
        offsets = form.layer_offsets(blocks)
        assert offsets[0] == form.header_bytes
        assert offsets[-1] + blocks * page_bytes[-1] == form.nbytes(blocks) == header.nbytes


def test_the_longest_header_of_an_engine_fits_whatever_its_layers() -> None:
    for layers in range(1, 200):
        form = make_format((1 << 20,) * layers, chunk_blocks=4096)
        out = np.zeros(form.header_bytes, dtype=np.uint8)
        each = replace(CHAIN[1], start=10**10 - 1, blocks=4096)
        form.write_header(out, each, namespace=NAMESPACE, checksums=[(1 << 64) - 1] * layers)
        assert parse_header(out.data).layers == form.layers


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_a_checksum_is_of_the_bytes_and_not_of_the_pieces(pieces: list[bytes]) -> None:
    arrays = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
    assert checksum(arrays) == xxhash.xxh3_64_intdigest(b"".join(pieces))


def test_the_right_bytes_pass_however_they_are_cut() -> None:
    for number in range(3):
        for pieces in (1, 2, 5):
            check(item(number, pieces=pieces))


@given(st.data())
def test_a_changed_byte_of_a_page_is_seen(data: st.DataObject) -> None:
    each = item(data.draw(st.integers(0, 2)))
    layer = data.draw(st.sampled_from(each.layers))
    where = data.draw(st.integers(0, layer[0].nbytes - 1))
    layer[0][where] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ObjectError, match="are damaged"):
        check(each)


@given(st.data())
def test_a_changed_header_is_refused_unless_it_says_the_same(data: st.DataObject) -> None:
    each = item()
    used = len(each.header.tobytes().rstrip())
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, used - 1))
        each.header[where] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'09af{}[]":,')))
    try:
        check(each)
    except ObjectError:
        return
    assert intact(FORM, each)
    header = parse_header(each.header.data)
    assert (header.key, header.rank, header.blocks) == (each.object.key.hex(), 3, each.object.blocks)


@pytest.mark.parametrize("other", [{"key": b"k" * 32}, {"start": 0}, {"blocks": 3}])
def test_another_object_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ObjectError, match="not the one asked for"):
        check(item(), **other)


def test_an_object_of_another_engine_rank_or_shape_is_refused() -> None:
    each = item()
    forms = [
        make_format((512, 40, 1000), rank=2),
        make_format((512, 40, 1001), rank=3),
        make_format((40, 512, 1000), rank=3),
        make_format((512, 40), rank=3),
        make_format((512, 40, 1000) * 12, rank=3),
    ]
    for form in forms:
        with pytest.raises(ObjectError):
            form.check(each.object, each.header, each.layers, namespace=NAMESPACE)
    with pytest.raises(ObjectError, match="not the one asked for"):
        FORM.check(each.object, each.header, each.layers, namespace=b"n" * 32)


def build(change: Callable[[dict[str, Any]], object] = lambda entries: None, *, header_bytes: int = 4096) -> bytes:
    """The header of an object, after a change to its JSON."""
    text = item().header.tobytes()[8:].decode()
    entries = json.loads(text)
    change(entries)
    body = json.dumps(entries).encode().ljust(header_bytes - 8)
    return len(body).to_bytes(8, "little") + body


def metadata(**values: str) -> Callable[[dict[str, Any]], object]:
    return lambda entries: entries["__metadata__"].update(values)


def first_layer(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda entries: entries[FORM.layers[0]].update(values)


def test_a_header_that_is_built_as_ours_is_read() -> None:
    assert parse_header(build()) == parse_header(item().header.data)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another program's": (metadata(format="pt"), "not one that layerstream wrote"),
    "a newer version": (metadata(version="2"), "format version 2; this release reads 1"),
    "no version": (metadata(version="one"), "damaged"),
    "a negative start": (metadata(start="-4"), "cannot be"),
    "negative blocks": (metadata(blocks="-1"), "cannot be"),
    "endless digits": (metadata(blocks="9" * 4500), "damaged"),
    "a key for the terminal": (metadata(key="\x1b[31m"), "not hexadecimal"),
    "a parent for the filesystem": (metadata(parent="../.."), "not hexadecimal"),
    "too few checksums": (metadata(xxh3_64="12"), "damaged"),
    "checksums of no digits": (metadata(xxh3_64="zz zz zz"), "damaged"),
    "a negative checksum": (metadata(xxh3_64="-1 2 3"), "cannot be"),
    "no rank": (lambda entries: entries["__metadata__"].pop("rank"), "damaged"),
    "no metadata": (lambda entries: entries.pop("__metadata__"), "not one that layerstream wrote"),
    "a list of metadata": (lambda entries: entries.update(__metadata__=[1]), "damaged"),
    "a layer less": (lambda entries: entries.pop(FORM.layers[1]), "do not follow each other"),
    "another dtype": (first_layer(dtype="F32"), "do not follow each other"),
    "one dimension": (first_layer(shape=[4]), "damaged"),
    "pages of no bytes": (first_layer(shape=[4, 0], data_offsets=[0, 0]), "cannot be"),
    "a gap": (first_layer(data_offsets=[8, 2056]), "do not follow each other"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_header_that_is_not_ours_is_refused(reason: str) -> None:
    change, message = REFUSED[reason]
    with pytest.raises(ObjectError, match=message):
        parse_header(build(change, header_bytes=8192))


def test_an_object_of_no_blocks_is_refused() -> None:
    def empty(entries: dict[str, Any]) -> None:
        metadata(blocks="0")(entries)
        for name in FORM.layers:
            entries[name].update(shape=[0, entries[name]["shape"][1]], data_offsets=[0, 0])

    with pytest.raises(ObjectError, match="cannot be"):
        parse_header(build(empty))


def test_pages_that_do_not_start_aligned_are_refused() -> None:
    with pytest.raises(ObjectError, match="damaged"):
        parse_header(build(header_bytes=4104))


def test_nested_brackets_are_no_way_to_break_a_scan() -> None:
    for text in (b'{"a":' + b"[" * 60000, b'{"a":' * 10000):
        with pytest.raises(ObjectError, match="damaged"):
            parse_header(len(text).to_bytes(8, "little") + text)


def test_a_header_cut_anywhere_is_refused() -> None:
    data = build()
    for length in (0, 1, 7, 8, 9, 100, 4095):
        with pytest.raises(ObjectError):
            parse_header(data[:length])
    assert parse_header(data + b"pages").header_bytes == 4096


printable = st.text(alphabet=string.printable, max_size=8)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | printable,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(printable, inner, max_size=3),
    max_leaves=8,
)


@given(st.one_of(st.binary(max_size=200), st.dictionaries(printable, anything, max_size=4)), anything)
def test_whatever_is_in_a_file_it_is_an_object_or_an_object_error(
    content: bytes | dict[str, Any], more: object
) -> None:
    if isinstance(content, dict):
        content["__metadata__"] = {"format": "layerstream", "version": "1", "key": more}
        body = json.dumps(content).encode()
        content = len(body).to_bytes(8, "little") + body
    with pytest.raises(ObjectError):
        parse_header(content)


def test_a_format_tells_sizes_before_anything_is_written() -> None:
    form = ObjectFormat(layers=["a", "b"], page_bytes=[100, 28], chunk_blocks=8, block_tokens=16, rank=0)
    assert form.header_bytes == 4096 and form.block_bytes == 128
    assert form.nbytes(3) == 4096 + 3 * 128
    assert form.layer_offsets(3) == [4096, 4096 + 300]


PORTABLE = ObjectFormat(
    layers=FORM.layers, page_bytes=(64, 192, 5), chunk_blocks=64, block_tokens=1, rank=3, heads=(1, 3, 5)
)


def portable_item() -> Item:
    return fill(PORTABLE, empty_item(PORTABLE, replace(CHAIN[1], start=64, blocks=48), Room(1 << 20)))


def test_a_portable_object_has_heads_and_tokens() -> None:
    each = portable_item()
    header = parse_header(each.header.data)
    assert (header.start, header.blocks, header.tokens, header.heads) == (64, 48, 48, (1, 3, 5))
    assert header.page_bytes == PORTABLE.page_bytes and header.nbytes == each.nbytes
    said = json.loads(each.header[8:].tobytes())
    assert [said[name]["shape"] for name in PORTABLE.layers] == [[1, 48, 64], [3, 48, 64], [5, 48, 1]]
    assert said["__metadata__"]["canonical"] == "1"
    assert intact(PORTABLE, each)


def test_pages_and_portable_objects_never_pass_for_each_other() -> None:
    each, pages = (
        portable_item(),
        ObjectFormat(layers=FORM.layers, page_bytes=PORTABLE.page_bytes, chunk_blocks=64, block_tokens=1, rank=3),
    )
    assert pages.header_bytes == PORTABLE.header_bytes
    with pytest.raises(ObjectError, match="not the one asked for"):
        pages.check(each.object, each.header, each.layers, namespace=NAMESPACE)
    other = fill(pages, empty_item(pages, each.object, Room(1 << 20)))
    with pytest.raises(ObjectError, match="not the one asked for"):
        PORTABLE.check(other.object, other.header, other.layers, namespace=NAMESPACE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda said: said["__metadata__"].update(canonical="2"),
            "in version 2 of the canonical form; this release reads 1",
            id="another version",
        ),
        pytest.param(
            lambda said: said["__metadata__"].update(canonical=""), "in version  of the canonical form", id="no version"
        ),
        pytest.param(lambda said: said["__metadata__"].pop("canonical"), "its header is damaged", id="pages"),
        pytest.param(lambda said: said[FORM.layers[0]].update(shape=[48, 64]), "its header is damaged", id="no heads"),
        pytest.param(
            lambda said: said[FORM.layers[0]].update(shape=[1, 64, 48]), "its header is damaged", id="other tokens"
        ),
        pytest.param(
            lambda said: said[FORM.layers[0]].update(shape=[-1, 48, -64]), "its header is damaged", id="negative heads"
        ),
        pytest.param(
            lambda said: said[FORM.layers[1]].update(shape=[1, 48, 192]), "not the one asked for", id="other heads"
        ),
    ],
)
def test_a_portable_object_that_says_something_else_is_refused(change: Callable[[Any], Any], message: str) -> None:
    each = portable_item()
    said = json.loads(each.header[8:].tobytes())
    change(said)
    text = json.dumps(said, separators=(",", ":")).encode()
    each.header[8:] = np.frombuffer(text.ljust(len(each.header) - 8), dtype=np.uint8)
    with pytest.raises(ObjectError, match=message):
        PORTABLE.check(each.object, each.header, each.layers, namespace=NAMESPACE)
