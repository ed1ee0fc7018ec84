from __future__ import annotations

import sys
from pathlib import Path

# Scripts in profiles/ are run from the checkout and are no part of the package. Last, so that nothing is shadowed.
sys.path.append(str(Path(__file__).parents[2]))
