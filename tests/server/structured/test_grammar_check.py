"""Grammars that would end the process are refused by another one."""

import json
import threading

import pytest
from llguidance import LLMatcher

from choreograph.server.structured.grammar_check import GrammarChecker


@pytest.fixture
def checker():
    result = GrammarChecker(seconds=30)
    yield result
    result.close()


def chain(count):
    """A grammar whose rules lead from one to the next."""
    rules = "".join(f'a{i}: a{i + 1} a{i + 1} | "x"\n' for i in range(count))
    return LLMatcher.grammar_from_lark(f'start: a0\n{rules}a{count}: "y"')


def nested(count):
    """A schema whose references lead from one to the next."""
    links = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(count)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": links | {f"d{count}": {"type": "string"}}}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def test_valid_and_invalid_grammars(checker):
    assert checker.validate(LLMatcher.grammar_from_regex("a+")) == ""
    assert "invalid regex" in checker.validate(LLMatcher.grammar_from_regex("("))
    assert checker.validate("no grammar at all") != ""
    assert checker.validate(LLMatcher.grammar_from_regex("é\n日")) == ""


def test_a_grammar_that_ends_the_process_is_refused_and_the_next_one_is_checked(checker):
    assert "nests too deeply" in checker.validate(nested(20_000))
    assert checker.validate(chain(100)) == ""


def test_a_grammar_that_takes_too_long_is_refused():
    checker = GrammarChecker(seconds=0.01)
    try:
        assert "takes longer than 0.01 s" in checker.validate(chain(8000))
    finally:
        checker.close()


def test_threads_take_turns_at_the_grammar_checker(checker):
    results = []
    threads = [threading.Thread(target=lambda: results.append(checker.validate(chain(50)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [""] * 8


def test_the_process_ends_with_the_checker(checker):
    checker.validate(LLMatcher.grammar_from_regex("a"))
    process = checker._process
    checker.close()
    assert process.poll() is not None
