from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.backends.nvidia

from layerstream.errors import TransferError
from layerstream.streams import driver as module
from layerstream.streams.base import CopyBatch
from layerstream.streams.cuda import CudaDevice
from layerstream.streams.driver import BATCH_ROWS, CudaDriver, MemcpyAttributes, loaded_driver
from tests.rigs.fake_cuda import Entry, FakeCuda, FakeDriver, OldFakeDriver

STREAM = 0x1000


@pytest.fixture
def api() -> Iterator[FakeCuda]:
    with FakeCuda() as api:
        api.Stream()
        yield api


@pytest.fixture(params=[FakeDriver, OldFakeDriver])
def library(request: pytest.FixtureRequest, api: FakeCuda) -> FakeDriver:
    made: FakeDriver = request.param(api)
    return made


def scattered(rows: int) -> tuple[torch.Tensor, torch.Tensor, CopyBatch]:
    """A target, a source, and a batch that copies one to the other in two-byte rows in reverse order."""
    target, source = torch.zeros(2 * rows, dtype=torch.uint8), torch.randint(0, 256, (2 * rows,), dtype=torch.uint8)
    offsets = 2 * np.arange(rows, dtype=np.uint64)[::-1]
    batch = CopyBatch(
        offsets + np.uint64(target.data_ptr()),
        offsets + np.uint64(source.data_ptr()),
        np.full(rows, 2, dtype=np.uint64),
    )
    return target, source, batch


def calls(api: FakeCuda) -> list[tuple[str, object]]:
    return [(entry.call, entry.what) for entry in api.log]


def test_a_batch_is_one_call_in_stream_order(api: FakeCuda, library: FakeDriver) -> None:
    target, source, batch = scattered(5)
    CudaDriver(library).copy_batch(STREAM, batch)
    assert api.log == [Entry("copy_batch", 1, 5)] and target.sum() == 0
    api.run()
    assert torch.equal(target, source)
    (attributes,) = library.attributes
    assert attributes.source_order == 1 and attributes.flags == 1
    assert attributes.source_hint.type == attributes.target_hint.type == 0


@pytest.mark.parametrize("rows", [BATCH_ROWS, BATCH_ROWS + 1, 2 * BATCH_ROWS + 7])
def test_no_call_has_more_rows_than_allowed(api: FakeCuda, library: FakeDriver, rows: int) -> None:
    target, source, batch = scattered(rows)
    CudaDriver(library).copy_batch(STREAM, batch)
    sizes = [entry.what for entry in api.log]
    assert sizes == [BATCH_ROWS] * (rows // BATCH_ROWS) + [rows % BATCH_ROWS] * (rows % BATCH_ROWS > 0)
    api.run()
    assert torch.equal(target, source)


def test_a_driver_without_support_is_asked_once(api: FakeCuda, library: FakeDriver) -> None:
    library.refuse = {"cuMemcpyBatchAsync_v2": 801}
    driver = CudaDriver(library)
    target, source, batch = scattered(3)
    supported = [driver.batches]
    driver.copy_batch(STREAM, batch)
    supported.append(driver.batches)
    library.refuse = {}
    driver.copy_batch(STREAM, batch)
    assert supported == [True, False]
    assert calls(api) == [("copy", 2)] * 6
    api.run()
    assert torch.equal(target, source)


def test_support_that_ends_amid_a_batch_leaves_no_row_out_and_none_twice(api: FakeCuda, library: FakeDriver) -> None:
    target, source, batch = scattered(BATCH_ROWS + 2)
    driver = CudaDriver(library)
    whole = driver._batch
    assert whole is not None
    counts: list[int] = []

    def once(stream: int, targets: int, sources: int, sizes: int, count: int) -> int:
        counts.append(count)
        return whole(stream, targets, sources, sizes, count) if len(counts) == 1 else 801

    driver._batch = once
    driver.copy_batch(STREAM, batch)
    assert counts == [BATCH_ROWS, 2]
    assert calls(api) == [("copy_batch", BATCH_ROWS), ("copy", 2), ("copy", 2)]
    api.run()
    assert torch.equal(target, source)


def test_without_the_symbol_copies_go_one_by_one(api: FakeCuda) -> None:
    class Bare(FakeDriver):
        cuMemcpyBatchAsync_v2 = None  # type: ignore[assignment]  # noqa: N815

    driver = CudaDriver(Bare(api))
    assert not driver.batches
    _, _, batch = scattered(2)
    driver.copy_batch(STREAM, batch)
    assert calls(api) == [("copy", 2)] * 2


@pytest.mark.parametrize("stream", [0, STREAM])
def test_singly_and_on_the_default_stream_batches_are_left_alone(
    api: FakeCuda, library: FakeDriver, stream: int
) -> None:
    driver = CudaDriver(library)
    _, _, batch = scattered(2)
    driver.copy_batch(stream, batch, singly=stream != 0)
    assert calls(api) == [("copy", 2)] * 2 and driver.batches


def test_refusals_are_transfer_errors_with_the_drivers_own_name(api: FakeCuda, library: FakeDriver) -> None:
    driver = CudaDriver(library)
    _, _, batch = scattered(2)
    word = torch.zeros(1, dtype=torch.int32)
    uses: list[tuple[str, str, Callable[[], None]]] = [
        ("cuMemcpyBatchAsync_v2", "a batch of 2 copies", lambda: driver.copy_batch(STREAM, batch)),
        ("cuMemcpyAsync", "a copy of 2 bytes", lambda: driver.copy_batch(STREAM, batch, singly=True)),
        ("cuStreamWaitValue32_v2", "a wait for a value", lambda: driver.wait_value(STREAM, word.data_ptr(), 0)),
        ("cuStreamWriteValue32_v2", "a write of a value", lambda: driver.write_value(STREAM, word.data_ptr(), 0)),
    ]
    for function, what, use in uses:
        library.refuse = {function: 1}
        with pytest.raises(TransferError, match=rf"refused {what}.*CUDA_ERROR_INVALID_VALUE \(1\)"):
            use()
        library.refuse = {function: 999}
        with pytest.raises(TransferError, match=r"an unknown error \(999\)"):
            use()
    assert driver.batches, "only a driver that does not support batches is not asked again"


def test_a_stream_waits_for_a_value_and_another_writes_it(api: FakeCuda, library: FakeDriver) -> None:
    other = api.Stream()
    driver = CudaDriver(library)
    word = torch.zeros(1, dtype=torch.int32)
    ran: list[str] = []
    driver.wait_value(STREAM, word.data_ptr(), -7)
    with api.stream(api.streams[1]):
        api.kernel(ran.append)("behind")
    api.run()
    assert ran == []
    driver.write_value(other.cuda_stream, word.data_ptr(), -7)
    api.run()
    assert ran == ["behind"] and word.item() == -7


def test_a_driver_too_old_for_waits_says_so(api: FakeCuda) -> None:
    class Old(FakeDriver):
        cuStreamWaitValue32_v2 = None  # type: ignore[assignment]  # noqa: N815

    with pytest.raises(TransferError, match="no cuStreamWaitValue32_v2; a wait for a value needs CUDA"):
        CudaDriver(Old(api)).wait_value(STREAM, 4096, 1)


def test_without_a_driver_the_error_says_what_to_do() -> None:
    assert loaded_driver() is None, "no test loads the driver"
    with pytest.raises(TransferError, match=r"libcuda\.so\.1.*use the device through torch\.cuda first"):
        CudaDriver()


def test_the_device_hands_its_batches_to_the_loaded_driver(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    stream = device.stream("copy", priority=0)
    _, _, batch = scattered(2)
    stream.copy_batch(batch)
    graph = device.capture(stream, lambda: stream.copy_batch(batch))
    assert calls(api) == [("copy_batch", 2), ("copy", 2), ("copy", 2)], "a captured batch is single copies"
    stream.replay(graph)
    assert device.driver() is device.driver()


# The declarations are those of cuda.h, which Triton ships


HEADER = Path(triton.backends.nvidia.__file__ or "").parent / "include" / "cuda.h"


def declaration(pattern: str) -> str:
    found = re.search(pattern, HEADER.read_text(), re.DOTALL)
    assert found is not None, pattern
    return found.group(1)


@pytest.mark.parametrize(
    ("name", "exported"),
    [
        ("cuGetErrorName", "cuGetErrorName"),
        ("cuMemcpyAsync", "cuMemcpyAsync"),
        ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync_v2"),
        ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync"),
        ("cuStreamWaitValue32", "cuStreamWaitValue32_v2"),
        ("cuStreamWriteValue32", "cuStreamWriteValue32_v2"),
    ],
)
def test_signatures_are_those_of_the_header(name: str, exported: str) -> None:
    # Below, the header undoes its renaming and declares every exported form by its own name.
    text = declaration(rf".*(?:CUresult CUDAAPI {name}\((.*?)\);)")
    sizes = {"CUdeviceptr": 8, "size_t": ctypes.sizeof(ctypes.c_size_t), "CUresult": 4, "unsigned int": 4}
    sizes |= {"cuuint32_t": 4, "CUstream": 8}
    expected = [
        8 if "*" in argument else sizes[re.sub(r"\s+\w+$", "", argument.strip())] for argument in text.split(",")
    ]
    assert [ctypes.sizeof(kind) for kind in module._SIGNATURES[exported]] == expected


def test_the_attributes_are_those_of_the_header() -> None:
    fields = declaration(r"typedef struct CUmemcpyAttributes_st \{(.*?)\}")
    names = re.findall(r"^\s*(?:unsigned )?\w+ (\w+);", fields, re.MULTILINE)
    assert names == ["srcAccessOrder", "srcLocHint", "dstLocHint", "flags"]
    assert [name for name, *_ in MemcpyAttributes._fields_] == ["source_order", "source_hint", "target_hint", "flags"]
    assert ctypes.sizeof(MemcpyAttributes) == 4 + 8 + 8 + 4
    location = declaration(r"typedef struct CUmemLocation_st \{(.*?)\}")
    assert re.findall(r"(\w+);", location) == ["type", "id"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CU_MEMCPY_SRC_ACCESS_ORDER_STREAM", module.SOURCE_ORDER_STREAM),
        ("CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE", module.PREFER_OVERLAP),
        ("CU_STREAM_WAIT_VALUE_EQ", module.WAIT_VALUE_EQ),
        ("CUDA_ERROR_NOT_SUPPORTED", module.NOT_SUPPORTED),
    ],
)
def test_constants_are_those_of_the_header(name: str, value: int) -> None:
    assert int(declaration(rf"\b{name}\s*= (\w+)"), 0) == value
