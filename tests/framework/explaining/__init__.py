"""Explaining steps: departures by ranks, verdicts, planted causes."""
