"""Large numbers for people."""

from __future__ import annotations


def operations(value: float) -> str:
    """1234567890 as '1.23 G'."""
    return _scaled(value, 1000, ("", "K", "M", "G", "T", "P"))


def size(value: float) -> str:
    """1572864 as '1.50 MiB'."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    unit = 0
    while value >= step and unit < len(units) - 1:
        value, unit = value / step, unit + 1
    digits = 0 if unit == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {units[unit]}".rstrip()
