"""Records of the benchmark of Prompt Cache, also LongBench's own, as modules."""

import json

from benchmarks.prompt_cache_quality import make_schema_and_prompt, read_records, score
from choreograph.prompt_cache import dumps


def test_passages_of_longbench_become_modules(tmp_path):
    file = tmp_path / "hotpotqa.jsonl"
    context = "Passage 1:\nBern\nBern is old.\nPassage 2:\nRome\nRome is older.\n"
    official = {"_id": "a", "dataset": "hotpotqa", "all_classes": None, "input": "Which?", "answers": ["Rome"]}
    counted = {**official, "dataset": "passage_count", "input": "", "answers": ["2"]}
    file.write_text("\n".join(json.dumps({**record, "context": context}) for record in (official, counted)))
    question, count = read_records(file)
    assert (question["id"], question["task"]) == ("a", "hotpotqa")
    schema, prompt = make_schema_and_prompt(question)
    text = dumps(schema)
    assert text.count("<module") == 2 and text.index("Bern is old") < text.index("Rome is older")
    assert "Which?" in dumps(prompt)
    assert "How many different ones" in dumps(make_schema_and_prompt(count)[1])
    assert (score(question, "Rome, Bern"), score(count, "2 of 4")) == (2 / 3, 0.5)
