"""Replicas on a local Ray answer as one server does, also where one of them dies."""

import pytest


def ask(client, **options):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Name a bridge."}], "max_tokens": 8, "seed": 1}
    return client.chat.completions.create(**body | options)


def test_chat_on_replicas(ray_client):
    answer = ask(ray_client)
    assert answer.usage.completion_tokens
