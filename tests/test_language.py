"""The language check finds phrases in prose, in names and across lines."""

from pathlib import Path

import pytest

from tests import language
from tests.language import checked_files, findings, patterns

PHRASES = '[phrases]\n"odd words?" = "plain words"\n'


@pytest.fixture
def phrases_in(tmp_path: Path, monkeypatch):
    """Return a function that lists the findings of a text, as pairs of line and phrase, for a short list."""
    path = tmp_path / "phrases.toml"
    path.write_text(PHRASES)
    monkeypatch.setattr(language, "LIST", path)
    return lambda text: [(finding.line, finding.phrase) for finding in findings(text, patterns())]


def test_phrases_are_found_in_prose_and_names(phrases_in) -> None:
    """An underscore in a name counts as a space, and the case does not matter."""
    text = "A text with odd words.\nrun.odd_word()\nOdd Words"
    assert phrases_in(text) == [(1, "odd words"), (2, "odd word"), (3, "Odd Words")]


def test_a_phrase_may_continue_on_the_next_line(phrases_in) -> None:
    """The prefix of a comment is not part of the phrase."""
    assert phrases_in("# a text with odd\n# words") == [(1, "odd words")]


@pytest.mark.parametrize("text", ["odd wordings", "plodd words", "words that are odd", "odd, words"])
def test_similar_words_are_no_phrases(text: str, phrases_in) -> None:
    assert phrases_in(text) == []


def test_every_phrase_has_a_replacement() -> None:
    assert patterns()
    assert all(instead.strip() for _, instead in patterns())


@pytest.mark.parametrize("code", ["from a import parts\nfrom b import c", "the gradient of its own batch"])
def test_code_and_plain_english_are_accepted(code: str) -> None:
    assert not list(findings(code, patterns()))


@pytest.mark.process
def test_source_tests_and_docs_are_checked() -> None:
    """The files from git include the command line, a test and a page, but not the phrases themselves."""
    names = {path.name for path in checked_files()}
    assert {"command.py", "test_style.py", "guarantees.md"} <= names
    assert "phrases.toml" not in names


@pytest.mark.parametrize(("text", "status"), [("odd words", 1), ("plain words", 0)])
def test_a_finding_fails_the_check(text: str, status: int, phrases_in, tmp_path: Path, monkeypatch, capsys) -> None:
    """Each finding is printed with its replacement, and the command returns status 1."""
    (tmp_path / "page.md").write_text(text)
    monkeypatch.setattr(language, "ROOT", tmp_path)
    monkeypatch.setattr(language, "checked_files", lambda: [tmp_path / "page.md"])
    assert language.main() == status
    assert capsys.readouterr().out == ("page.md:1: 'odd words': write plain words\n" if status else "")
