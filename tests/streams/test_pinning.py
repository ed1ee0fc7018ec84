from __future__ import annotations

from pathlib import Path

import pytest

from layerstream.streams.pinning import CudaPinner, loaded_cudart
from tests.rigs.fake_cuda import FakeRuntime


def test_a_refusal_leaves_no_error_behind() -> None:
    runtime = FakeRuntime(refuse_from=2)
    pinner = CudaPinner(runtime)
    assert pinner.register(4096, 100) is True
    assert pinner.register(8192, 100) is False
    assert runtime.last_error == 0
    assert runtime.registered == {4096: 100}


def test_a_failed_unregistration_is_told_and_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime()
    CudaPinner(runtime).unregister(4096)
    assert "stays pinned" in caplog.text
    assert runtime.last_error == 0


@pytest.mark.parametrize("call", ["register", "unregister"])
def test_memory_is_pinned_for_its_device_from_whatever_thread(call: str) -> None:
    runtime = FakeRuntime()
    pinner = CudaPinner(runtime, device=3)
    pinner.register(4096, 100)
    runtime.device = 0
    if call == "register":
        pinner.register(8192, 100)
    else:
        pinner.unregister(4096)
    assert runtime.device == 3


def test_without_a_runtime_every_registration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerstream.streams.pinning.loaded_cudart", lambda: None)
    assert CudaPinner().register(4096, 100) is False


def test_the_runtime_is_found_among_mapped_files(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 0 \n7f01-7f02 r-xp 00000000 08:01 1  /usr/lib/libc.so.6\n")
    assert loaded_cudart(maps) is None
    maps.write_text(maps.read_text() + "7f02-7f03 r-xp 00000000 08:01 2  /nowhere/libcudart_stub.so\n")
    assert loaded_cudart(maps) is None
    maps.write_text(maps.read_text() + "7f02-7f03 r-xp 00000000 08:01 2  /nowhere/with space/libcudart-1a2b.so.13\n")
    with pytest.raises(OSError, match=r"/nowhere/with space/libcudart-1a2b\.so\.13"):
        loaded_cudart(maps)
