"""An answer's usage in OpenAI's words."""

from __future__ import annotations

from bireme.messages import Usage
from bireme.openai.text.completion_answer import batch_usage
from bireme.pipelines.chat_usage import usage_json

PLAIN = Usage(prompt_tokens=5, completion_tokens=9)
DRAFTED = Usage(prompt_tokens=5, completion_tokens=9, drafted_tokens=12, accepted_tokens=7)


def test_what_became_of_drafts_is_told_over_all_answers():
    told = usage_json([DRAFTED, PLAIN, DRAFTED])["completion_tokens_details"]
    assert told == {"reasoning_tokens": 0, "accepted_prediction_tokens": 14, "rejected_prediction_tokens": 10}
    told = batch_usage([DRAFTED, PLAIN], 1)["completion_tokens_details"]
    assert told == {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 5}


def test_no_more_is_accepted_than_a_stop_string_left():
    cut = Usage(prompt_tokens=5, completion_tokens=3, drafted_tokens=12, accepted_tokens=7)
    told = usage_json([cut])["completion_tokens_details"]
    assert (told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]) == (3, 9)


def test_without_drafts_nothing_is_said_of_them():
    assert usage_json([PLAIN])["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert "completion_tokens_details" not in batch_usage([PLAIN], 1)
