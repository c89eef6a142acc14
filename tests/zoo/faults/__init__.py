"""Trainings with one planted fault each."""
