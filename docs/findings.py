"""The findings of the doctor by symptom, from the texts of the detectors."""

import inspect
from collections.abc import Iterator

from loopscope.doctor import Detector, Threshold, all_detectors


def by_symptom() -> dict[str, list[Detector]]:
    """Return the detectors of this distribution by symptom, in alphabetical order."""
    found: dict[str, list[Detector]] = {}
    for detector in all_detectors():
        if type(detector).__module__.startswith("loopscope.doctor."):
            found.setdefault(paragraphs(detector)["Symptom"], []).append(detector)
    return dict(sorted(found.items()))


def page() -> str:
    """Return the text of the page without its title."""
    lines: list[str] = []
    for symptom, detectors in by_symptom().items():
        lines += [f"## {symptom}", ""]
        for detector in detectors:
            lines += [*_section(detector), ""]
    return "\n".join(lines).rstrip() + "\n"


def paragraphs(detector: Detector) -> dict[str, str]:
    """Return the paragraphs of a detector's docstring after the first by label; ``Cause`` is the one without."""
    texts = {"Applies to": "every optimizer, at any step"}
    for paragraph in (inspect.getdoc(type(detector)) or "").split("\n\n")[1:]:
        label, _, text = " ".join(paragraph.split()).partition(": ")
        has_label = label in ("Symptom", "Applies to", "Source")
        texts |= {label: text} if has_label else {"Cause": " ".join(paragraph.split())}
    return texts


def _section(detector: Detector) -> Iterator[str]:
    texts = paragraphs(detector)
    yield f"### `{detector.name}`"
    yield ""
    yield texts["Cause"]
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| applies to | {texts['Applies to']} |"
    for name, limit in detector.thresholds().items():
        yield f"| limit `{name}` | {_limit(limit)} |"
    if detector.needs:
        yield f"| needs | {', '.join(f'[`{hook}`](hooks/{hook}.md)' for hook in detector.needs)} |"
    if "Source" in texts:
        yield f"| source | {texts['Source']} |"


def _limit(threshold: Threshold) -> str:
    return f"{threshold.value:g}: {threshold.reason}".replace("|", "\\|")
