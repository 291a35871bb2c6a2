"""Questions of the benchmark of rules: which documents they read."""

import json

import pytest

from benchmarks.rules import NUM_READ, PROGRAMS, REFERENCE, SOME_PROGRAMS, groups_of


@pytest.fixture
def folder(tmp_path):
    single = [
        {"question": f"q{i}", "answers": [f"a{i}"], "documents": [{"title": f"t{i}", "text": f"d{i}"}]}
        for i in range(23)
    ]
    several = [
        {
            "question": f"q{i}",
            "answer": f"a{i}",
            "documents": [{"title": f"{i}/{j}", "text": ""} for j in range(10)],
            "supporting_titles": [f"{i}/3", f"{i}/7"],
        }
        for i in range(12)
    ]
    for name, records in (("nq_oracle", single), ("hotpotqa", several)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path


def test_every_question_reads_its_document_and_others_of_its_group(folder):
    groups = groups_of("nq_oracle", folder, 20)
    assert [len(group.questions) for group in groups] == [10, 10]
    for number, question in enumerate(question for group in groups for question in group.questions):
        assert question.text == f"q{number}" and question.answers == [f"a{number}"]
        assert len(set(question.reads)) == NUM_READ and number % 10 in question.reads
    assert groups[0].documents[3] == "t3\nd3"


def test_questions_with_documents_of_their_own_read_no_others(folder):
    groups = groups_of("hotpotqa", folder, 12)
    assert [len(group.questions) for group in groups] == [10, 2]
    for group in groups:
        for number, question in enumerate(group.questions):
            titles = [group.documents[i].strip() for i in question.reads]
            owner = titles[0].split("/")[0]
            assert len(set(titles)) == NUM_READ and {f"{owner}/3", f"{owner}/7"} < set(titles)
            assert {title.split("/")[0] for title in titles} == {question.text[1:]}, number


def test_the_programs_of_every_set_have_the_reference_and_prefix_mode():
    for names in (PROGRAMS, SOME_PROGRAMS):
        assert {REFERENCE, f"{REFERENCE}, prefix mode"} <= set(names) <= set(PROGRAMS)
