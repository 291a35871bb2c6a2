"""The Prisoner's Dilemma with private plans (Prompt Choreography, section 3.4): what leaks through an encoding?

Alice and Bob each plan in private, talk for two rounds, then decide. Alice's words are encoded behind her own
instructions and plan; choreographed, Bob reads those very encodings. `leak` re-encodes what Bob hears from her:
"system" with sight of her instructions but not her plan, "plan" the other way round (behind a bare opening), "none"
with sight of that opening and the talk alone.
"""

from ..engine.message import Message
from ..errors import ConfigError
from .parsing import first_decision
from .run import BASELINE, Condition, WorkflowRun

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
    name: Condition("choreographed", {"leak": leak}, replayed_stages=("Alice plans", "Bob plans"))
    for name, leak in (("leak both", "both"), ("leak system", "system"), ("leak plan", "plan"), ("leak none", "none"))
}


def run(
    wf: WorkflowRun,
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
    host_tokens = {"Alice": STRATEGIES[strategy] + (f"\n{orders}" if orders else ""), "Bob": ""}
    private = {me: private_context(wf, me, other, host_tokens[me]) for me, other in _pairs()}
    heard: dict[str, list[Message]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for me in order:
            said = wf.decode(f"{me} says", wf.assistant(f"{me}:"), [*private[me], *heard[me]], max_tokens=48)
            retold = (
                reencode_for_bob(wf, said, leak, private["Alice"], heard) if me == "Alice" and leak != "both" else said
            )
            heard["Alice"].append(said)
            heard["Bob"].append(retold)
    requested = {(who, what): final_question(wf, what, who, [*private[who], *heard[who]]) for who, what in _questions()}
    for (who, what), message in requested.items():
        read = first_decision(message.text)
        if read is None:
            wf.record_parse_failure(f"{who} {what}")
        wf.record(f"{who} {what}", read)
    return requested["Bob", "decides"]


def _pairs() -> tuple[tuple[str, str], ...]:
    return NAMES, NAMES[::-1]


def _questions() -> tuple[tuple[str, str], ...]:
    return ("Alice", "decides"), ("Bob", "decides"), ("Bob", "predicts")


def private_context(wf: WorkflowRun, player: str, opponent: str, extra_instructions: str) -> list[Message]:
    """What one player alone sees: instructions with what else it is told, a plan, and the call to talk."""
    names = {"me": player, "other": opponent}
    system = wf.prefill(f"{player} system", wf.system(RULES.format(**names) + extra_instructions))
    think = wf.prefill("plan prompt", wf.user(PLAN.format(**names)), [system])
    plan = wf.decode(f"{player} plans", wf.assistant("My plan:"), [system, think], max_tokens=80)
    talk = wf.prefill("talk prompt", wf.user(TALK.format(**names)), [system, think, plan])
    return [system, think, plan, talk]


def reencode_for_bob(
    wf: WorkflowRun, message: Message, leak: str, private: list[Message], received: dict[str, list[Message]]
) -> Message:
    """Alice's words once more for Bob, at the place where she said them, with sight of less."""
    system, _, plan, _ = private
    seen = [system if leak == "system" else wf.prefill("opening", wf.system(OPENING))]
    places = {m.id: at for m, at in zip(message.parents, message.offsets, strict=True)}
    offsets = [0]
    if leak == "plan":  # a copy of her plan that was made without sight of her instructions
        seen.append(wf.prefill("plan retold", plan.tokens, seen, new_offset=plan.position))
        offsets.append(plan.position)
    talked = zip(received["Alice"], received["Bob"], strict=True)
    parents = seen + [host_tokens for _, host_tokens in talked]
    offsets += [places[own.id] for own in received["Alice"]]
    return wf.prefill("retold", message.tokens, parents, offsets=offsets, new_offset=message.position)


def final_question(wf: WorkflowRun, action: str, player: str, context: list[Message]) -> Message:
    """One question at the end: what the player decides, or what it thinks that the other will do."""
    other = NAMES[player == "Alice"]
    text = (DECIDE if action == "decides" else PREDICT).format(me=player, other=other)
    question = wf.prefill(f"{action} prompt", wf.user(text), context)
    header = f"{player} will" if action == "decides" else f"{other} will"
    return wf.decode(f"{player} {action}", wf.assistant(header), [*context, question], max_tokens=8)
