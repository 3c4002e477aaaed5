"""The tests that show what the settings of reward parts and of their rules do (test_every_setting.py)."""

from __future__ import annotations

COMBINED, TEXTS, TASKS = "scoring/test_combined.py", "scoring/service/test_texts.py", "scoring/test_verifier.py"
PARTS = "training/test_combined_runs.py"
OF_PARTS = {
    **dict.fromkeys(
        ("source", "function", "weight"),
        f"{PARTS}::test_rows_and_evaluations_have_mean_and_spread_of_every_part",
    ),
    "timeout_seconds": "scoring/test_sources.py::test_a_late_function_is_given_up_after_timeout_seconds",
    "retries": f"{COMBINED}::test_a_function_that_raises_is_named_by_its_table",
    "on_failure": f"{COMBINED}::test_a_part_says_for_itself_whether_its_failure_stops_the_run",
    "checkpoint": f"{PARTS}::test_each_model_says_in_its_part_what_it_says_alone",
    **dict.fromkeys(("model", "label"), f"{PARTS}::test_each_model_says_in_its_part_what_it_says_alone"),
    **dict.fromkeys(
        ("template", "max_tokens", "device", "engine"), f"{PARTS}::test_a_classifier_of_a_part_is_the_same_as_alone"
    ),
    "url": f"{TEXTS}::test_a_fourfold_serve_is_such_a_service",
    "token_env": f"{TEXTS}::test_a_token_is_read_from_the_environment_and_sent",
    "max_rows": f"{TEXTS}::test_rows_go_in_requests_of_at_most_max_rows_and_come_back_in_order",
    "task": f"{TASKS}::test_what_the_package_does_not_know_is_refused",
    "task_settings": f"{TASKS}::test_what_the_package_does_not_know_is_refused",
    **dict.fromkeys(
        ("size", "seed"), f"{TASKS}::test_held_out_questions_come_from_the_next_seed_and_are_not_asked_in_training"
    ),
    "prompt_template": f"{TASKS}::test_questions_stand_in_their_template",
    "answer_tag": f"{TASKS}::test_the_answer_is_the_response_or_what_stands_last_in_its_tag",
}
OF_RULES = {
    **dict.fromkeys(("kind", "score", "shortest", "longest"), "test_length_and_excess_are_two_views_of_one_range"),
    **dict.fromkeys(("pattern", "each", "at_most", "inverted"), "test_matches_count_once_or_each_up_to_a_limit"),
    "words": "test_keywords_are_whole_words_whatever_their_case",
    "unit": "test_units",
    "format": "test_formats",
}
