import io

import torch
from hypothesis import given
from hypothesis import strategies as st

from training_hooks.step_window import StepWindow, column


def filled(length: int, values: list[int]) -> StepWindow:
    window = StepWindow(2, length)
    for value in values:
        window.push(torch.tensor([value, -value]))
    return window


@given(st.integers(1, 6), st.lists(st.integers(-9, 9), max_size=20))
def test_the_newest_values_are_kept_oldest_first(length, values):
    window, kept = filled(length, values), values[-length:]
    assert window.ordered.tolist() == [kept, [-value for value in kept]]
    assert sorted(window.unordered[0].tolist()) == sorted(kept)
    assert (window.count, window.is_full) == (len(values), len(values) >= length)


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_window_that_was_saved_and_read_goes_on_as_if_it_had_not_been(before, after):
    whole = filled(4, list(range(before + after)))
    file = io.BytesIO()
    torch.save(filled(4, list(range(before))).state_dict(), file)
    file.seek(0)
    second = StepWindow(2, 4)
    second.load_state_dict(torch.load(file, weights_only=True))
    for value in range(before, before + after):
        second.push(torch.tensor([value, -value]))
    assert second.ordered.tolist() == whole.ordered.tolist()


def test_two_windows_never_share_a_buffer():
    first, second = filled(3, [1, 2, 3]), StepWindow(2, 3)
    second.load_state_dict(first.state_dict())
    second.push(torch.tensor([7, -7]))
    assert first.ordered.tolist() == [[1, 2, 3], [-1, -2, -3]]


def test_a_column_is_wide_enough_for_any_scalar():
    values = column(torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(3, dtype=torch.float16), 0.5)
    assert values.tolist() == [1 / 3, 3, 0.5]
