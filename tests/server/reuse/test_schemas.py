"""Prompt Cache schemas through the server."""

import httpx
import openai
import pytest

from choreograph import SamplingParams
from choreograph.prompt_cache.cache import PromptCache

SCHEMA = """<schema name="trip">You plan trips by rail and boat for small groups of friends.
<module name="alps">The alps have trains to many high villages and long walks between them.</module>
<union><module name="ferry">A ferry leaves twice a day.</module><module name="bus">A bus leaves hourly.</module></union>
</schema>"""
PROMPT = '<prompt schema="trip"><alps/><ferry/> What is the first day?</prompt>'
OTHER = '<prompt schema="trip"><alps/><bus/> What is the last day?</prompt>'


def put(live, name="trip", pml=SCHEMA):
    return httpx.put(f"{live.url}/v1/schemas/{name}", json={"pml": pml})


def complete(client, prompt, **options):
    return client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=6,
        temperature=0,
        extra_body={"choreography": {"schema": "trip"}},
        **options,
    )


def test_modules_are_encoded_once_and_answers_are_the_librarys(live, client):
    assert put(live).json() == {"id": "trip", "modules": ["", "alps", "ferry", "bus"]}
    first = complete(client, PROMPT)
    second = complete(client, OTHER)
    assert first.usage.model_extra["choreography"]["message_tokens"] == 0
    assert second.usage.model_extra["choreography"]["message_tokens"] > 20
    live.wait_until_idle()
    with PromptCache(live.engine, SCHEMA) as cache, live.engine.session() as session:
        expected = cache.generate(session, PROMPT, sampling=SamplingParams(temperature=0, max_tokens=6))
        assert first.choices[0].text == expected.text
    live.engine.check()


def test_streams_and_several_answers(live, client):
    put(live)
    whole = complete(client, PROMPT)
    pieces = [chunk.choices[0].text for chunk in complete(client, PROMPT, stream=True) if chunk.choices]
    assert "".join(pieces) == whole.choices[0].text
    assert [choice.text for choice in complete(client, PROMPT, n=2).choices] == [whole.choices[0].text] * 2


def test_schemas_are_listed_replaced_and_deleted(live, client):
    put(live)
    put(live)
    assert {"id": "trip"} in httpx.get(f"{live.url}/v1/schemas").json()["data"]
    assert httpx.delete(f"{live.url}/v1/schemas/trip").json() == {"id": "trip", "deleted": True}
    assert httpx.delete(f"{live.url}/v1/schemas/trip").status_code == 404
    with pytest.raises(openai.NotFoundError, match="PUT it first"):
        complete(client, PROMPT)


@pytest.mark.parametrize(
    ("pml", "text"),
    [
        ("<schema name='trip'>", "never closed"),
        ("<schema name='other'>x</schema>", "'other'"),
        ("<schema name='trip'><module name='a' src='/etc/hostname'/></schema>", "src"),
        ("", "schema"),
    ],
)
def test_wrong_schemas_are_refused(live, pml, text):
    answer = put(live, pml=pml)
    assert answer.status_code == 400 and text in answer.json()["error"]["message"]


def test_wrong_prompts_are_refused(live, client):
    put(live)
    for prompt, options in [
        ("<prompt schema='trip'><sea/></prompt>", {}),
        ("plain text", {}),
        ([1, 2], {}),
        (PROMPT, {"echo": True}),
    ]:
        with pytest.raises(openai.BadRequestError):
            complete(client, prompt, **options)
    with pytest.raises(openai.BadRequestError, match="/v1/completions"):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"choreography": {"schema": "trip"}},
        )
