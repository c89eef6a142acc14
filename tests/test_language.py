"""The language check finds phrases in prose, in names and across lines."""

import pytest

from tests.language import checked_files, findings, patterns


def phrases_in(text: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.phrase) for finding in findings(text, patterns())]


def test_phrases_are_found_in_prose_and_names() -> None:
    """An underscore in a name counts as a space, and the case does not matter."""
    assert phrases_in("A run that goes on.\nrun.goes_on()\nGoes On") == [(1, "goes on"), (2, "goes on"), (3, "Goes On")]


def test_a_phrase_may_continue_on_the_next_line() -> None:
    """The prefix of a comment or a quotation is not part of the phrase."""
    assert phrases_in("# the run goes\n# on afterwards") == [(1, "goes on")]


@pytest.mark.parametrize("text", ["dearth of data", "a scaffold, ongoing", "from parts import x", "its own loss"])
def test_similar_words_are_no_phrases(text: str) -> None:
    assert phrases_in(text) == []


def test_every_phrase_has_a_replacement() -> None:
    assert patterns()
    assert all(instead.strip() for _, instead in patterns())


@pytest.mark.process
def test_source_tests_and_docs_are_checked() -> None:
    """The list of git contains the command line, a test and a page, but neither the phrases nor this file."""
    names = {path.name for path in checked_files()}
    assert {"command.py", "test_style.py", "guarantees.md"} <= names
    assert not {"phrases.toml", "test_language.py"} & names
