"""A debate in plain `openai` calls, for any OpenAI server; with `choreograph serve --reuse auto` quotes are reused.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/serve/debate.py
"""

import asyncio

from openai import AsyncOpenAI

QUESTION = "Should a small town build a second bridge over its river?"


async def ask(client: AsyncOpenAI, model: str, system: str, user: str) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    answer = await client.chat.completions.create(model=model, messages=messages, temperature=0.7, max_tokens=64)
    return (answer.choices[0].message.content or "").strip()


async def main() -> None:
    async with AsyncOpenAI() as client:
        model = (await client.models.list()).data[0].id
        roles = [f"You are debater {number}. Argue in three sentences." for number in (1, 2, 3)]
        speeches = await asyncio.gather(*(ask(client, model, role, QUESTION) for role in roles))
        for _ in range(2):  # each round quotes what the others said
            quotes = [f"Debater {number} said:\n{speech}" for number, speech in enumerate(speeches, 1)]
            prompts = ["\n\n".join([QUESTION, *(q for q in quotes if q is not own)]) for own in quotes]
            speeches = await asyncio.gather(
                *(ask(client, model, role, prompt) for role, prompt in zip(roles, prompts, strict=True))
            )
        quotes = [f"Debater {number} said:\n{speech}" for number, speech in enumerate(speeches, 1)]
        print(await ask(client, model, "You judge debates.", "\n\n".join([QUESTION, *quotes, "Who is right?"])))


asyncio.run(main())
