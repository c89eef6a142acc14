"""Pictures into files; matplotlib, an extra that nothing else needs, is imported with the first of them."""

from pathlib import Path

from .panels import Look, Picture


def save_picture(picture: Picture, look: Look, path: Path, about: tuple[str, str] = ("", "")) -> None:
    """Draw a picture and write it, whole or not at all, in the format that the name's suffix says.

    ``about`` are a description and keywords, as which programs show them; both lie in the file as plain text.
    """
    from .drawing import figure_of, save

    save(figure_of(picture, look), path, about)
