"""Colours and dashes that distinguish runs on the page, also without colour vision and in print."""

from collections.abc import Sequence
from dataclasses import dataclass

from .panels import COLOURS as PLOTTED

COLOURS = (*PLOTTED[:-1], "#808080")
"""The colours of plots, with grey in place of black, which is invisible on a dark page."""
DASHES: Sequence[Sequence[int]] = ((), (2, 3), (9, 3, 2, 3), (12, 4))
"""Lengths of strokes and gaps in pixels, one pattern for each use of all colours."""
TREATED: Sequence[Sequence[int]] = ((6, 4), (6, 4, 1, 4), (14, 3, 5, 3), (3, 2))
"""The same for runs with treatments, whose curves are dashed."""


@dataclass(frozen=True)
class RunStyle:
    """The colour and the dash pattern of a run's curves."""

    colour: str
    dash: Sequence[int] = ()

    @classmethod
    def numbered(cls, place: int, *, is_treated: bool = False) -> "RunStyle":
        """Return the style of the run, or the group of seeds, at a place.

        >>> RunStyle.numbered(0), RunStyle.numbered(8)
        (RunStyle(colour='#0072B2', dash=()), RunStyle(colour='#D55E00', dash=(2, 3)))
        """
        patterns = TREATED if is_treated else DASHES
        return cls(COLOURS[place % len(COLOURS)], patterns[place // len(COLOURS) % len(patterns)])

    @property
    def swatch(self) -> str:
        """A piece of the line as an inline picture."""
        dashes = " ".join(map(str, self.dash))
        line = f'<line x1="0" y1="5" x2="28" y2="5" stroke="{self.colour}" stroke-dasharray="{dashes}"></line>'
        return f'<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true">{line}</svg>'


def styles_of(groups: Sequence[str], treated: Sequence[bool]) -> list[RunStyle]:
    """Return the style of each run; the seeds of a group share one if there are several groups."""
    distinct = list(dict.fromkeys(groups))
    is_by_group = 1 < len(distinct) < len(groups)
    places = [distinct.index(group) if is_by_group else index for index, group in enumerate(groups)]
    return [RunStyle.numbered(place, is_treated=has) for place, has in zip(places, treated, strict=True)]
