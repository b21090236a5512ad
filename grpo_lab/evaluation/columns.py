"""Rows of cells as the columns of a table: what no row has is left out."""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def without_empty(rows: Rows) -> list[list[str]]:
    """`rows`, the first of them the head, without the columns in which every other one is empty; the first column stays."""
    kept = [i for i in range(len(rows[0])) if i == 0 or any(row[i] for row in rows[1:])]
    return [[row[i] for i in kept] for row in rows]


def aligned(rows: Rows) -> list[str]:
    """One line a row, columns two blanks apart, without empty ones."""
    shown = without_empty(rows)
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
