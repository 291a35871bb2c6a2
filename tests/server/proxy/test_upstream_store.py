"""Plans of prompts over entries of a server: every span is tokens that were stored, and limits hold."""

from helpers.hypothesis_profile import many
from hypothesis import given, settings
from hypothesis import strategies as st

from choreograph.server.proxy.upstream_prompt import can_reuse, find_cuts, find_turn_tokens, read_prompt
from choreograph.server.proxy.upstream_store import EntryStore, UpstreamEntry, UpstreamTenant

KEY, OTHER = (UpstreamTenant("key", "", "m", workflow, ()) for workflow in ("a", "b"))


def complete(store, plan, answer=(), key=KEY):
    """Store what a plan computes, and its answer."""
    *parts, last = [part.entry for part in plan.computed]
    store.add(key, [*parts, UpstreamEntry([*last.tokens, *answer], last.lineage, last.name)])


def check_plan(plan, tokens, entries):
    """Check that parts are the prompt, and that spans are tokens of entries."""
    assert [part.start for part in plan.parts] == [0, *(part.stop for part in plan.parts[:-1])]
    assert plan.parts[-1].stop == len(tokens) and plan.parts[-1].source == "computed"
    for part in plan.parts:
        length = part.stop - part.start
        assert length > 0
        stored = part.entry.tokens[part.source_start : part.source_start + length]
        assert stored == tokens[part.start : part.stop]
        assert part.source == "computed" or entries[part.entry.name] == part.entry.tokens
    assert sum(plan.counts().values()) == len(tokens)


PASSAGES = [[100 * n + i for i in range(n + 12)] for n in range(1, 9)]
PROMPTS = st.lists(
    st.one_of(st.sampled_from(PASSAGES), st.lists(st.integers(0, 5), max_size=6)), min_size=1, max_size=6
).map(lambda parts: [token for part in parts for token in part] or [1])


@settings(max_examples=many(120), deadline=None)
@given(st.lists(st.tuples(PROMPTS, st.sampled_from([KEY, OTHER])), min_size=1, max_size=8), st.integers(0, 400))
def test_spans_are_what_was_stored_for_the_tenant(prompts, limit):
    store, stored = EntryStore(limit), {KEY: {}, OTHER: {}}
    for tokens, key in prompts:
        cuts = [i for i, token in enumerate(tokens) if token % 100 == 0]
        plan = store.plan(key, tokens, cuts)
        check_plan(plan, tokens, stored[key])
        complete(store, plan, [7, 8, 9], key)
        stored[key] |= {part.entry.name: part.entry.tokens for part in plan.computed[:-1]}
        last = plan.computed[-1].entry
        stored[key][last.name] = [*last.tokens, 7, 8, 9]
        store.check()


def test_a_prompt_that_continues_is_a_prefix_up_to_its_last_token():
    store, tokens = EntryStore(1000), list(range(40))
    complete(store, store.plan(KEY, tokens), [41, 42])
    plan = store.plan(KEY, [*tokens, 41, 42, 50, 51])
    assert plan.counts() == {"prefix_tokens": 42, "message_tokens": 0, "quoted_tokens": 0, "computed_tokens": 2}
    assert store.plan(KEY, tokens).counts()["computed_tokens"] == 1


def test_whole_messages_win_over_quotes_of_longer_texts():
    store, message = EntryStore(1000), list(range(20))
    prompts = ([300, 301, *message, 302, 303], [*message, 310])
    for plan in [store.plan(KEY, prompt, cuts=[0, 20]) for prompt in prompts]:  # two requests at once
        complete(store, plan)
    plan = store.plan(KEY, [320, 321, *message, 302, 322], cuts=[2, 22])
    (part,) = plan.reused
    assert (part.source, part.start, part.stop) == ("message", 2, 22) and part.entry.tokens == message


def test_holes_are_what_a_span_follows():
    store, left, right = EntryStore(1000), list(range(20)), list(range(50, 70))
    complete(store, store.plan(KEY, left))
    complete(store, store.plan(KEY, right))
    plan = store.plan(KEY, [300, *left, 301, 302, *right, 303])
    assert [[(part.start, part.stop) for part in run] for run in plan.holes()] == [[(0, 1)], [(21, 23)]]


def test_entries_of_equal_requests_at_once_are_kept_once():
    store, tokens = EntryStore(1000), list(range(40))
    plans = [store.plan(KEY, tokens, cuts=[0, 20]) for _ in range(3)]
    for plan in plans:
        complete(store, plan, [41, 42])
    assert store.num_tokens == 42
    assert len(store.take_releases(KEY)) == 4 and not store.take_releases(KEY)
    assert store.plan(KEY, [*tokens, 41, 42, 43]).counts()["prefix_tokens"] == 42


def test_the_tenant_that_stores_most_loses_its_oldest_entries():
    store = EntryStore(100)
    complete(store, store.plan(OTHER, list(range(500, 520))), key=OTHER)
    for start in range(0, 300, 30):
        complete(store, store.plan(KEY, list(range(start, start + 30))))
    assert store.num_tokens <= 100
    assert store.plan(OTHER, list(range(500, 520))).counts()["prefix_tokens"] == 19
    assert store.plan(KEY, list(range(270, 300))).counts()["prefix_tokens"] == 29
    assert store.plan(KEY, list(range(30))).counts()["prefix_tokens"] == 0


def test_a_dropped_entry_is_not_found():
    store, tokens = EntryStore(1000), list(range(40))
    plan = store.plan(KEY, tokens)
    complete(store, plan)
    store.drop(KEY, [plan.computed[0].entry.name, "unknown"])
    assert store.num_tokens == 0 and store.plan(KEY, tokens).counts()["computed_tokens"] == 40
    assert not store.take_releases(OTHER)
    other_key = KEY._replace(authorization="another")  # names are the server's, which knows no keys
    assert store.take_releases(other_key) == [plan.computed[0].entry.name, "unknown"]


def test_prompts_of_text_alone_can_reuse():
    text = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert can_reuse({"messages": [text], "echo": False, "prompt_logprobs": None})
    assert not can_reuse({"messages": [text, image]}) and not can_reuse({"prompt": "a", "prompt_logprobs": 0})


def test_cuts_are_where_turns_begin_unless_texts_have_their_token():
    assert find_cuts([9, 1, 2, 8, 3, 9], {8, 9}, 1) == [0, 3, 5]
    assert find_cuts([9, 1, 9, 9, 3, 9], {9}, 1) == [] == find_cuts([1, 2], (), 1)


async def test_the_server_renders_what_a_prompt_is_made_of():
    asked = []

    async def tokenize(body):
        asked.append(body)
        turns = [token for message in body["messages"] for token in (5 if message["role"] == "user" else 6, 1)]
        return [*turns, *([9, 3] if body.get("add_generation_prompt", True) else [])]

    assert await find_turn_tokens({"model": "m"}, tokenize) == {5, 9}
    chat = {"messages": [], "model": "m", "top_p": 1, "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}
    assert await read_prompt(chat, tokenize) == [9, 3]
    variables = {"reasoning_effort": "low", "enable_thinking": True, "x": 1}
    assert asked[-1] == {"messages": [], "model": "m", "chat_template_kwargs": variables}
    assert (
        await read_prompt({"prompt": [5, 6]}, tokenize) == [5, 6] == await read_prompt({"prompt": [[5, 6]]}, tokenize)
    )
    assert await read_prompt({"prompt": ["a", "b"]}, tokenize) == [] == await read_prompt({}, tokenize)
