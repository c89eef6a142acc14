"""Pictures into files; matplotlib, an extra that nothing else needs, is imported with the first of them."""

from pathlib import Path

from .panels import Look, Picture


def save_picture(picture: Picture, look: Look, path: Path) -> None:
    """Draw a picture and write it, whole or not at all, in the format that the name's suffix says."""
    from .drawing import figure_of, save

    save(figure_of(picture, look), path)
