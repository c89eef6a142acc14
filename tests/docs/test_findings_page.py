"""The page of findings is the one that ``make docs`` writes."""

from loopscope.doctor import all_detectors

from docs import findings


def test_page_of_findings_is_up_to_date() -> None:
    assert findings.PAGE.read_text(encoding="utf-8") == findings.page()


def test_every_detector_has_a_section() -> None:
    text = findings.PAGE.read_text(encoding="utf-8")
    assert all(f"### `{detector.name}`" in text for detector in all_detectors())
