"""The rows of the matrix; importing the modules of the trainings registers them."""

from tests.trainer_matrix import (
    custom_rows,
    hugging_face_rows,
    lightning_rows,
    optimizer_rows,
    rank_rows,
    recipe_rows,
    timm_rows,
)
from tests.trainer_matrix.row import ROWS

__all__ = [
    "ROWS",
    "custom_rows",
    "hugging_face_rows",
    "lightning_rows",
    "optimizer_rows",
    "rank_rows",
    "recipe_rows",
    "timm_rows",
]
