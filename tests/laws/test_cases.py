"""``loopscope check`` on some of the trainings."""

from pathlib import Path

import pytest

from tests.laws.__main__ import Case, cases

SOME = (
    "broken_rows_do_not_mix_1_lstm",
    "broken_future_is_not_seen_1_gpt",
    "broken_padding_does_not_matter_1_encoder",
    "broken_halves_make_a_whole_3_tagger",
    "broken_ranks_agree_2_gpt",
    "healthy_precision_is_enough_3_master",
    "healthy_future_is_not_seen_5_tcn",
    "healthy_every_parameter_learns_3_moe",
)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("case", cases(SOME), ids=lambda case: case.path.stem)
def test_check_names_the_broken_law(case: Case, tmp_path: Path) -> None:
    assert case.is_right(case.broken(tmp_path))


def test_every_case_names_known_laws() -> None:
    from loopscope.laws import LawRegistry, shipped  # noqa: F401 - registers the laws

    known = {*LawRegistry.names(), "none"}
    assert {case.law for case in cases()} | {law for case in cases() for law in case.also} <= known
