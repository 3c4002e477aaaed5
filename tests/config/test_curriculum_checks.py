"""What a curriculum may be."""

from __future__ import annotations

from config.test_checks import found


def test_a_curriculum_that_begins_at_the_whole_size_grows_nothing() -> None:
    [problem] = found("curriculum.steps=3", "sampling.max_new_tokens=24", "curriculum.start_new_tokens=24")
    assert problem.startswith("curriculum.start_new_tokens: given 24, but it grows to sampling.max_new_tokens = 24; ")
    assert not found("curriculum.steps=3", "sampling.max_new_tokens=24", "curriculum.start_new_tokens=23")
