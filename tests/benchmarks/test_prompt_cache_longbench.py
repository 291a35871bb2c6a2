"""The benchmark by LongBench data set: records in LongBench's own format become modules and new text."""

import json

from benchmarks.prompt_cache_longbench import SIDES, task_rows, time_record
from benchmarks.prompt_cache_quality import make_schema_and_prompt, read_records

PASSAGES = "Passage 1:\nBern\nBern is old.\nPassage 2:\nRome\nRome is older.\n"
RECORD = {"_id": "ab", "input": "Which is older?", "context": PASSAGES, "answers": ["Rome"], "dataset": "hotpotqa"}


def test_a_record_in_longbenchs_own_format_is_timed_on_every_side(tmp_path, talker):
    file = tmp_path / "hotpotqa.jsonl"
    file.write_text(json.dumps(RECORD))
    (record,) = read_records(file)
    times, (num_cached, num_new) = time_record(talker, record, 3)
    assert times.keys() == SIDES.keys()
    for one in times.values():
        assert 0 < one.first_token < one.total and 0 < one.next_token < one.total
    _, prompt = make_schema_and_prompt(record)
    assert [child.name for child in prompt.children[:-1]] == ["document-1", "document-2"]
    assert num_cached > 20 and num_new > 5
    rows = {row.measure: row for row in task_rows("hotpotqa", [(times, (num_cached, num_new))])}
    assert rows["hotpotqa: cached tokens"].value == num_cached
    ratio = times["whole"].first_token / times["host"].first_token
    assert rows["hotpotqa: first token, whole against modules in host memory"].value == ratio
    talker.check()
