"""Trainings that break a law, and right ones that come close, written without knowledge of the laws' code."""
