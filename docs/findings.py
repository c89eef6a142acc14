"""The findings of the doctor by symptom, from the texts of the detectors."""

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


def _section(detector: Detector) -> Iterator[str]:
    yield f"### `{detector.name}`"
    yield ""
    yield detector.cause
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| applies to | {detector.applies_to} |"
    for name, limit in detector.thresholds.items():
        yield f"| limit `{name}` | {_limit(limit)} |"
    if detector.needs:
        yield f"| needs | {', '.join(f'[`{hook}`](hooks/{hook}.md)' for hook in detector.needs)} |"
    if detector.source:
        yield f"| source | {detector.source} |"


def _limit(threshold: Threshold) -> str:
    return f"{threshold.value:g}: {threshold.reason}".replace("|", "\\|")
