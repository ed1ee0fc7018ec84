"""`layerstream bench --calibrate`: measure the transfer paths of this machine's device, and keep what was found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from layerstream.errors import ConfigError
from layerstream.model_store import cache_dir

if TYPE_CHECKING:
    from layerstream.rate_table import RateTable


def run_calibration(*, out: Path, device: str | None = None) -> int:
    """Measure, print, draw and keep.

    Args:
        out: folder for the picture.
        device: torch's name of the device; None takes the first GPU, or the CPU where there is none.

    Returns:
        The exit status.

    Raises:
        ConfigError: there is no such device, or a folder cannot be written.
    """
    import torch

    from layerstream.calibration import calibrate
    from layerstream.picture import draw_rates

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: torch knows no such device; use cpu, cuda or cuda:N") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: only cpu and cuda can be measured")
    if place.type == "cuda" and not (place.index or 0) < torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    console = Console()
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("points", total=None)
        table = calibrate(place, progress=lambda done, of: bar.update(task, completed=done, total=of))
    console.print(_rows(table))
    for page_bytes in table.page_sizes():
        choice = ", ".join(f"{path} from {blocks} blocks on" for blocks, path in table.fastest_loads(page_bytes))
        console.print(f"pages of {page_bytes >> 10} KiB: {choice}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        console.print(escape(f"picture: {draw_rates(table, out / 'calibration.png')}"))
        console.print(escape(f"kept in {table.write(cache_dir())}"))
    except OSError as error:
        raise ConfigError(f"the results cannot be written ({error}); name another folder with --out") from error
    if place.type == "cpu":
        console.print("A CPU engine keeps zero_copy whatever this table says: its pool and KV cache are one memory.")
    return 0


def _rows(table: RateTable) -> Table:
    shown = Table(box=None, title=f"Transfer paths on {table.device}, GB/s; of a large copy in brackets")
    for column in ("page", "blocks", "direction"):
        shown.add_column(column, justify="right" if column != "direction" else "left")
    paths = sorted({rate.path for rate in table.rates})
    for path in paths:
        shown.add_column(path, justify="right")
    rates = {(rate.page_bytes, rate.blocks, rate.direction, rate.path): rate.bytes_per_s for rate in table.rates}
    for page, blocks, direction in sorted({key[:3] for key in rates}):
        cells = []
        for path in paths:
            rate = rates.get((page, blocks, direction, path))
            share = "" if rate is None else f"{rate / 1e9:.2f} [{rate / table.roofs[direction]:.2f}]"
            cells.append(escape(share))
        shown.add_row(f"{page >> 10} KiB", str(blocks), direction, *cells)
    return shown
