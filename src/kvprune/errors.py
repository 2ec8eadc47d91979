"""The errors that kvprune raises on purpose."""

from __future__ import annotations


class PruneError(ValueError):
    """Bad input. The message names the thing, its value and the remedy."""


class BudgetError(PruneError):
    """A cache would have outgrown its budget; the numbers are bytes.

    `rows` must be read again: a forward pass broke off when some layers had read their new tokens
    and others had not. All other rows are as they were.
    """

    def __init__(self, asked: int, held: int, allowed: int, rows: tuple[int, ...] = ()):
        self.asked, self.held, self.allowed, self.rows = asked, held, allowed, rows
        state = f"rows {list(rows)} must be read again" if rows else "every row is as it was"
        super().__init__(
            f"{asked:,} more bytes do not fit: the cache holds {held:,} of the {allowed:,} that "
            f"its budget allows; {state}. Raise the budget, or let rows leave first"
        )

    def with_rows(self, rows: tuple[int, ...]) -> BudgetError:
        return BudgetError(self.asked, self.held, self.allowed, rows)
