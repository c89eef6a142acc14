"""Every promise of docs/guarantees.md has tests, which docs/proofs.md counts, and every marker names a promise."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import proofs
from tests.docs.markdown import ROOT, anchors, table_with

TEXT = "| promise | mechanism | limit |\n|---|---|---|\n| **A.** Text. | how | where |\n"
TEST = '@pytest.mark.guarantee("{name}")\ndef test_it():\n    """It works."""\n'


def page_of(folder: Path, *, promise: str = TEXT, test: str) -> str:
    """Return the page of one promise and one test."""
    (folder / "guarantees.md").write_text(promise)
    (folder / "test_it.py").write_text(test)
    return proofs.page(folder / "guarantees.md", folder)


@pytest.mark.process
def test_every_promise_has_tests() -> None:
    """A promise without tests, and a marker without a promise, raise an error here."""
    page = proofs.page()
    assert all(f"## {name}\n" in page for name in proofs.promises())


def test_every_promise_has_a_mechanism_and_a_limit() -> None:
    rows = table_with(proofs.GUARANTEES, "promise", "mechanism", "limit")
    assert len(rows) == len(proofs.promises()) > 10
    for row in rows:
        assert all(row.values()), row


def test_guarantees_are_read_in_three_minutes() -> None:
    """The sections after the table have the exceptions."""
    assert len(proofs.GUARANTEES.read_text(encoding="utf-8").partition("\n## ")[0].split()) < 1000


def test_sections_of_limits_are_named_after_promises() -> None:
    headings = anchors(proofs.GUARANTEES) - {"guarantees", "what-has-never-run-on-a-gpu"}
    assert headings <= proofs.promises().keys()


@pytest.mark.process
def test_every_proof_says_what_it_shows() -> None:
    assert [proof.name for proof in proofs.proofs() if not proof.sentence] == []


def test_proof_is_listed_under_its_promise(tmp_path: Path) -> None:
    shown = page_of(tmp_path, test=TEST.format(name="a"))
    assert "## a\n\n**A.** Text.\n" in shown
    assert "| [`test_it`](../tests/test_it.py) | It works. | quick |" in shown


def test_marker_without_promise_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No promise in docs/guarantees\.md is called b"):
        page_of(tmp_path, test=TEST.format(name="a") + TEST.format(name="b"))


def test_promise_without_test_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No test has the marker guarantee\('a'\)"):
        page_of(tmp_path, test="def test_it(): ...\n")


def test_examples_of_the_generator_are_right() -> None:
    assert doctest.testmod(proofs).failed == 0


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("tier", ["quick", "test"])
def test_pytest_collects_proofs_in_their_tiers(tier: str) -> None:
    """The tiers on the page are read from the source; pytest's collection has the same."""
    expression = re.sub(r"\s+", " ", quick_tests() if tier == "quick" else "not slow and not statistical")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", f"guarantee and {expression}"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    collected = set(re.findall(r"^tests/([\w/]+\.py)::(\w+)", output, re.M))
    wanted = {(proof.file, proof.name) for proof in proofs.proofs() if proof.tier in ("quick", tier)}
    assert collected == wanted


def quick_tests() -> str:
    """Return the marker expression of ``make fast`` in the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (expression,) = re.findall(r"^QUICK := (.*)$", text, re.M)
    return f"{expression} and not longer"
