"""Tests of folders of many runs."""
