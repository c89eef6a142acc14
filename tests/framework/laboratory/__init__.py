"""Tests of explanations: departures by ranks, verdicts, planted causes."""
