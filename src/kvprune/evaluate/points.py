"""Finished measurements of a sweep in one file: nothing is measured twice, nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically
from kvprune.utils.processes import ALONE, Group

Row = dict[str, Any]


class Points:
    """Rows of plain values, grouped under the setting that they were measured at.

    `measure` computes the rows of a setting once: a sweep that was interrupted resumes at the first
    setting that is not in the file. `about` (versions, sizes, the command) must be the same in both
    runs, as rows measured differently do not mix. Without a path nothing is stored. Of several
    processes (`group`) the main one has the file, and all have its rows.
    """

    def __init__(self, path: str | Path | None, about: Row | None = None, group: Group = ALONE):
        self.path, self.about = None if path is None else Path(path), about or {}
        self._group = group
        self._groups: dict[str, list[Row]] = {}
        if self.path is not None:
            self.about, self._groups = group.from_main(self._read)

    def _read(self) -> tuple[Row, dict[str, list[Row]]]:
        path = self.path
        if path is None or not path.exists():
            return self.about, {}
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            groups = {_key(group["setting"]): group["rows"] for group in saved["points"]}
        except (ValueError, KeyError, TypeError) as error:
            raise PruneError(
                f"{path} is not a file of measured points ({error}); move it away"
            ) from error
        for name, value in self.about.items():
            if saved["about"].get(name) != value:
                raise PruneError(
                    f"{path} was measured with {name} = {saved['about'].get(name)!r}, now it "
                    f"is {value!r}; measure into another file, or delete this one"
                )
        return saved["about"], groups

    def measure(self, setting: Row, rows: Callable[[], Iterable[Row]]) -> list[Row]:
        """The rows of this setting: from the file, or else computed and written to it."""
        key = _key(setting)
        if key not in self._groups:
            self._groups[key] = [{**setting, **row} for row in rows()]
            if self.path is not None and self._group.is_main:
                self.write(self.path)
        return self._groups[key]

    def __contains__(self, setting: Row) -> bool:
        return _key(setting) in self._groups

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self._groups.values() for row in rows]

    @property
    def document(self) -> Row:
        """Everything as one object: what is in the file, and what --json prints."""
        points = [{"setting": json.loads(key), "rows": rows} for key, rows in self._groups.items()]
        return {"about": self.about, "points": points}

    def write(self, path: Path) -> Path:
        """Write everything into this file, which is replaced."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.document, indent=1, ensure_ascii=False)
        write_atomically(path, text.encode())
        return path


def _key(setting: Row) -> str:
    return json.dumps(setting, sort_keys=True)
