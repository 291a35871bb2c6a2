"""`llm` as a client of the server, by an extra-openai-models.yaml."""

import json
import os

import pytest
from click.testing import CliRunner

os.environ["LLM_LOAD_PLUGINS"] = ""  # before the import: the bundled model's package is a plugin that needs llama.cpp

import llm
from llm.cli import cli

ASK = "Which river flows through Paris?"
OPTIONS = {"temperature": 0, "max_tokens": 12}


@pytest.fixture
def model(live, tmp_path, monkeypatch):
    """The server's model, as `llm` knows it."""
    entry = {"model_id": "choreograph", "model_name": "tiny", "api_base": f"{live.url}/v1", "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return llm.get_model("choreograph")


def test_a_prompt_has_the_answer_of_the_openai_client(client, model):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    same = client.chat.completions.create(model="tiny", messages=messages, **OPTIONS)
    whole = model.prompt(ASK, system="Be brief.", stream=False, **OPTIONS)
    assert whole.text() == same.choices[0].message.content
    usage = whole.usage()
    assert (usage.input, usage.output) == (same.usage.prompt_tokens, 12)


def test_a_streamed_prompt_comes_in_pieces_with_its_usage(model):
    response = model.prompt(ASK, stream=True, **OPTIONS)
    pieces = list(response)
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == model.prompt(ASK, stream=False, **OPTIONS).text()
    assert response.usage().output == 12


def test_a_conversation_sends_its_earlier_messages(client, model):
    conversation = model.conversation()
    first = conversation.prompt(ASK, **OPTIONS).text()
    second = conversation.prompt("And through Rome?", **OPTIONS).text()
    messages = [{"role": "user", "content": ASK}, {"role": "assistant", "content": first}]
    messages.append({"role": "user", "content": "And through Rome?"})
    assert (
        second == client.chat.completions.create(model="tiny", messages=messages, **OPTIONS).choices[0].message.content
    )


def test_answers_to_llm_follow_a_schema(model):
    schema = {
        "type": "object",
        "properties": {"side": {"enum": ["north", "south"]}},
        "required": ["side"],
        "additionalProperties": False,
    }
    answer = model.prompt(ASK, schema=schema, stream=False, temperature=0, max_tokens=60)
    assert json.loads(answer.text())["side"] in ("north", "south")


def test_the_command_line_prints_the_answer(model):
    options = [text for name, value in OPTIONS.items() for text in ("-o", name, str(value))]
    result = CliRunner().invoke(cli, ["prompt", "-m", "choreograph", "--no-log", *options, ASK], catch_exceptions=False)
    assert result.exit_code == 0 and result.output == model.prompt(ASK, **OPTIONS).text() + "\n"
