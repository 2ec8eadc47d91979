"""How much memory the machine has to give."""

from __future__ import annotations

import os
from pathlib import Path

# where nobody says how much there is
UNKNOWN = 4 * 2**30


def available() -> int:
    """Bytes that a new process could take without pushing out others."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:  # macOS and others: what is installed
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return UNKNOWN
