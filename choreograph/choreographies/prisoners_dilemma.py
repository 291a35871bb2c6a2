"""The Prisoner's Dilemma with private plans (Prompt Choreography, section 3.4): what leaks through an encoding?

Alice and Bob each plan in private, talk for two rounds, then decide. Alice's words are encoded behind her own
instructions and plan; choreographed, Bob reads those very encodings. `leak` re-encodes what Bob hears from her:
"system" with sight of her instructions but not her plan, "plan" the other way round (behind a bare opening), "none"
with sight of that opening and the talk alone.
"""

from ..errors import ConfigError
from ..message import Message
from .performance import BASELINE, Condition, Performance
from .reading import decision

RULES = (
    "You are {me}. You and {other} play one game. You talk first; then each of you secretly decides to cooperate or "
    "to defect.\nBoth cooperate: 3 points each. Both defect: 1 point each. One defects alone: 5 points for the one who "
    "defects, 0 for the other.\nYou want as many points as you can get."
)
STRATEGIES = {
    "none": "",
    "cooperate": " Your strategy is to always cooperate.",
    "defect": " Your strategy is to always defect.",
}
OPENING = "You are Alice."  # in place of her instructions, where those are not to be seen
PLAN = "Think in private about how you will play, in two or three sentences. {other} does not see this."
TALK = "Now talk to {other}. Say one or two sentences at a time, as {me}."
DECIDE = "The talk is over. Decide as {me}. Answer with one word: cooperate or defect."
PREDICT = "The talk is over. What will {other} do? Answer with one word: cooperate or defect."
LEAKS = ("both", "system", "plan", "none")
NAMES = ("Alice", "Bob")
CONDITIONS = BASELINE | {
    name: Condition("choreographed", {"leak": leak}, copies=("Alice plans", "Bob plans"))
    for name, leak in (("leak both", "both"), ("leak system", "system"), ("leak plan", "plan"), ("leak none", "none"))
}


def run(
    p: Performance,
    task: str = "Alice",
    *,
    strategy: str = "none",
    orders: str = "",
    leak: str = "both",
    rounds: int = 2,
) -> Message:
    """task: who speaks first. orders: what else stands in Alice's instructions. Bob's decision, not read yet; findings
    hold both decisions and Bob's prediction."""
    first = task.strip().capitalize()
    for name, value, known in (("task", first, NAMES), ("strategy", strategy, STRATEGIES), ("leak", leak, LEAKS)):
        if value not in known:
            raise ConfigError(f"{name}={value!r}: use one of {list(known)}")
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: use 1 or more")
    order = NAMES if first == "Alice" else NAMES[::-1]
    told = {"Alice": STRATEGIES[strategy] + (f"\n{orders}" if orders else ""), "Bob": ""}
    private = {me: prepare(p, me, other, told[me]) for me, other in _pairs()}
    heard: dict[str, list[Message]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for me in order:
            said = p.decode(f"{me} says", p.assistant(f"{me}:"), [*private[me], *heard[me]], most=48)
            retold = retell(p, said, leak, private["Alice"], heard) if me == "Alice" and leak != "both" else said
            heard["Alice"].append(said)
            heard["Bob"].append(retold)
    asked = {(who, what): ask(p, what, who, [*private[who], *heard[who]]) for who, what in _questions()}
    for (who, what), message in asked.items():
        read = decision(message.text)
        if read is None:
            p.could_not_parse(f"{who} {what}")
        p.note(f"{who} {what}", read)
    return asked["Bob", "decides"]


def _pairs() -> tuple[tuple[str, str], ...]:
    return NAMES, NAMES[::-1]


def _questions() -> tuple[tuple[str, str], ...]:
    return ("Alice", "decides"), ("Bob", "decides"), ("Bob", "predicts")


def prepare(p: Performance, me: str, other: str, told: str) -> list[Message]:
    """What one player alone sees: instructions with what else it is told, a plan, and the call to talk."""
    names = {"me": me, "other": other}
    system = p.prefill(f"{me} system", p.system(RULES.format(**names) + told))
    think = p.prefill("plan prompt", p.user(PLAN.format(**names)), [system])
    plan = p.decode(f"{me} plans", p.assistant("My plan:"), [system, think], most=80)
    talk = p.prefill("talk prompt", p.user(TALK.format(**names)), [system, think, plan])
    return [system, think, plan, talk]


def retell(
    p: Performance, said: Message, leak: str, private: list[Message], heard: dict[str, list[Message]]
) -> Message:
    """Alice's words once more for Bob, at the place where she said them, with sight of less."""
    system, _, plan, _ = private
    seen = [system if leak == "system" else p.prefill("opening", p.system(OPENING))]
    places = {m.id: at for m, at in zip(said.parents, said.offsets, strict=True)}
    offsets = [0]
    if leak == "plan":  # a copy of her plan that was made without sight of her instructions
        seen.append(p.prefill("plan retold", plan.tokens, seen, new_offset=plan.start))
        offsets.append(plan.start)
    talked = zip(heard["Alice"], heard["Bob"], strict=True)
    parents = seen + [told for _, told in talked]
    offsets += [places[own.id] for own in heard["Alice"]]
    return p.prefill("retold", said.tokens, parents, offsets=offsets, new_offset=said.start)


def ask(p: Performance, what: str, who: str, seen: list[Message]) -> Message:
    """One question at the end: what the player decides, or what it thinks that the other will do."""
    other = NAMES[who == "Alice"]
    text = (DECIDE if what == "decides" else PREDICT).format(me=who, other=other)
    question = p.prefill(f"{what} prompt", p.user(text), seen)
    header = f"{who} will" if what == "decides" else f"{other} will"
    return p.decode(f"{who} {what}", p.assistant(header), [*seen, question], most=8)
