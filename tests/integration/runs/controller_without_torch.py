"""Runs the controller as on a machine without torch: importing torch or transformers fails.

The groups are processes of another interpreter start, so they have torch all the same.
"""

from __future__ import annotations

import sys
from typing import Any

for name in ("torch", "transformers"):
    modules: dict[str, Any] = sys.modules
    modules[name] = None

if __name__ == "__main__":
    from controller.__main__ import main

    sys.exit(main(sys.argv[1:]))
