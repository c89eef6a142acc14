"""Dates of generated pages."""

from datetime import date


def today() -> str:
    """Return the date, as in 1 January 2026."""
    return f"{date.today().day} {date.today():%B %Y}"
