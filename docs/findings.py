"""The findings of the doctor by symptom, from the texts of the detectors."""

import inspect
from collections.abc import Iterator

from loopscope.doctor import Detector, Threshold, all_detectors


def by_symptom() -> dict[str, list[Detector]]:
    """Return the detectors of this distribution by symptom, in alphabetical order."""
    found: dict[str, list[Detector]] = {}
    for detector in all_detectors():
        if type(detector).__module__.startswith("loopscope.doctor."):
            found.setdefault(detector.symptom, []).append(detector)
    return dict(sorted(found.items()))


def page() -> str:
    """Return the text of the page without its title."""
    lines: list[str] = []
    for symptom, detectors in by_symptom().items():
        lines += [f"## {symptom}", ""]
        for detector in detectors:
            lines += [*_section(detector), ""]
    return "\n".join(lines).rstrip() + "\n"


def paragraphs(detector: Detector) -> tuple[str, dict[str, str]]:
    """Return the paragraph of a detector's docstring about causes, and the texts of those that start with a label."""
    _, cause, *others = (" ".join(part.split()) for part in (inspect.getdoc(type(detector)) or "").split("\n\n"))
    labelled = (part.partition(": ") for part in others)
    return cause, {label.lower(): text for label, _, text in labelled}


def _section(detector: Detector) -> Iterator[str]:
    cause, texts = paragraphs(detector)
    yield f"### `{detector.name}`"
    yield ""
    yield cause
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| applies to | {texts.get('applies to', 'every optimizer, at any step')} |"
    for name, limit in detector.thresholds().items():
        yield f"| limit `{name}` | {_limit(limit)} |"
    if detector.needs:
        yield f"| needs | {', '.join(f'[`{hook}`](hooks/{hook}.md)' for hook in detector.needs)} |"
    if "source" in texts:
        yield f"| source | {texts['source']} |"


def _limit(threshold: Threshold) -> str:
    return f"{threshold.value:g}: {threshold.reason}".replace("|", "\\|")
