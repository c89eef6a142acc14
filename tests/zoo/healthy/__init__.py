"""Healthy trainings, usual and unusual ones."""
