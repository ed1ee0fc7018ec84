"""Compare the installed vLLM with what was reviewed of it, or accept what it does: `--accept`."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

TESTS = Path(__file__).resolve().parents[3]


def main(arguments: list[str] | None = None) -> int:
    """Print the difference; 1 if there is one that is not accepted."""
    parser = argparse.ArgumentParser(prog="python tests/hooks/vllm/contract", description=__doc__)
    parser.add_argument("--accept", action="store_true", help="write down what is found as reviewed")
    accept: bool = parser.parse_args(arguments).accept
    if str(TESTS) not in getattr(sys.modules.get("tests"), "__path__", ()):
        # The checkout's: it is not installed, and another package is called so too.
        package = types.ModuleType("tests")
        package.__path__ = [str(TESTS)]
        sys.modules["tests"] = package
    from tests.hooks.vllm.contract.reviewed import compare, facts_of, path_of, write
    from tests.hooks.vllm.contract.source import installed

    source = installed()
    difference = compare(source)
    sys.stdout.write(difference or f"vLLM {source.version} does what is relied on\n")
    if not accept:
        return int(bool(difference))
    if difference:
        write(source.minor, facts_of(source))
        sys.stdout.write(f"\nAccepted: commit {path_of(source.minor)} with what the change asks of hooks/vllm\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
