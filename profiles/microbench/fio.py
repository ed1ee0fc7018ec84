"""fio, the plain tool that the disk tier is measured against: whole files, one call each, with O_DIRECT."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

TIMEOUT_S = 300.0


class FioNotThereError(RuntimeError):
    """fio is not installed."""


class Fio:
    """Reads or writes files named `<job>.<number>` in one folder.

    Args:
        folder: where the files are.
        files: how many, spread evenly over the jobs.
        file_bytes: of each, a multiple of 4096.

    Raises:
        FioNotThereError: there is no fio.
    """

    def __init__(self, folder: Path, *, files: int, file_bytes: int) -> None:
        program = shutil.which("fio")
        if program is None:
            raise FioNotThereError("fio is not installed; apt-get install fio")
        self._program, self.folder, self._files, self._file_bytes = program, folder, files, file_bytes

    @property
    def version(self) -> str:
        """As it says it."""
        return subprocess.run([self._program, "--version"], capture_output=True, check=True, text=True).stdout.strip()

    def names(self, jobs: int) -> list[Path]:
        """The files, in the order in which they are given to jobs."""
        return [self.folder / f"{number % jobs}.{number // jobs}" for number in range(self._files)]

    def seconds(self, how: Literal["read", "write"], *, jobs: int) -> float:
        """Seconds that fio says its jobs took together, on threads side by side; starting them is not in it.

        Args:
            how: "read" takes the files as they are; "write" makes them, and they must not be there.
            jobs: a divisor of the number of files.

        Raises:
            RuntimeError: it failed, or moved other bytes than all.
        """
        each, rest = divmod(self._files, jobs)
        if rest:
            raise RuntimeError(f"{self._files} files cannot be spread evenly over {jobs} jobs of fio")
        command = [
            self._program, "--output-format=json", "--group_reporting", "--thread", "--name=files",
            f"--directory={self.folder}", "--filename_format=$jobnum.$filenum", f"--numjobs={jobs}",
            f"--nrfiles={each}", f"--filesize={self._file_bytes}", f"--size={each * self._file_bytes}",
            "--ioengine=psync", "--direct=1", f"--bs={self._file_bytes}", f"--rw={how}",
            "--file_service_type=sequential",
        ]  # fmt: skip
        if how == "write":
            # As whoever writes a file of which nothing was known before.
            command += ["--fallocate=none", "--create_on_open=1"]
        ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=TIMEOUT_S)
        if ended.returncode:
            raise RuntimeError(f"fio ended with status {ended.returncode}: {ended.stderr or ended.stdout}")
        return runtime_s(ended.stdout, how, nbytes=self._files * self._file_bytes)


def runtime_s(output: str, how: str, *, nbytes: int) -> float:
    """Seconds of fio's one group of jobs, in its JSON.

    Raises:
        RuntimeError: it moved other than `nbytes` bytes.
    """
    # Warnings may stand before the JSON.
    told: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0][how]
    if told["io_bytes"] != nbytes:
        raise RuntimeError(f"fio moved {told['io_bytes']} bytes instead of {nbytes}")
    return float(told["runtime"]) / 1e3
