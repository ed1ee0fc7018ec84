"""Compare a wheel with the tree: every module of layerstream, also those behind the links, and nothing else."""

import sys
import zipfile
from pathlib import Path


def modules_of_tree(root: Path) -> set[str]:
    """Names of the files a wheel must hold, as the wheel names them."""
    names = {"layerstream/py.typed"}
    for folder, prefix in (
        ("layerstream", "layerstream"),
        ("kernels", "layerstream/kernels"),
        ("hooks", "layerstream/hooks"),
        ("graphs", "layerstream/graphs"),
    ):
        base = root / folder
        names |= {f"{prefix}/{path.relative_to(base).as_posix()}" for path in base.rglob("*.py")}
    return names


def main(wheel: str) -> int:
    """Print what differs; 0 if nothing does."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = modules_of_tree(Path(__file__).resolve().parent.parent)
    for name in sorted(wanted - held):
        print(f"missing in the wheel: {name}")
    for name in sorted(held - wanted):
        print(f"not of the package: {name}")
    return int(held != wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
