"""Prisoner's Dilemma with private plans (Prompt Choreography §3.4).

Measures what leaks through the KV cache. Alice and Bob each plan in private, talk for two rounds,
then decide. Alice's messages attend to her own instructions and plan; in choreographed mode, Bob
reuses their KV. `leak` recomputes them for Bob: with "system" they attend to her instructions but
not to her plan, with "plan" to her plan after a neutral opening, with "none" to that opening and
the talk only. With `guard`, instructions and plans are labelled as private and every player has the
clearance for its own: the engine encodes messages again without them.
"""

from typing import Any

from ...api.message import Message
from ...errors import ConfigError
from .parsing import first_decision
from .run import BASELINE, Condition, WorkflowRun, check_choices

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

OPENING = "You are Alice."  # replaces her instructions unless they leak

PLAN = "Think in private about how you will play, in two or three sentences. {other} does not see this."

TALK = "Now talk to {other}. Say one or two sentences at a time, as {me}."

DECIDE = "The talk is over. Decide as {me}. Answer with one word: cooperate or defect."

PREDICT = "The talk is over. What will {other} do? Answer with one word: cooperate or defect."

LEAKS = ("both", "system", "plan", "none")

NAMES = ("Alice", "Bob")

CONDITIONS = BASELINE | {
    f"leak {leak}": Condition("choreographed", {"leak": leak}, replayed_stages=("Alice plans", "Bob plans"))
    for leak in LEAKS
}
CONDITIONS["guard"] = Condition("choreographed", {"guard": True}, replayed_stages=("Alice plans", "Bob plans"))


def run(
    wf: WorkflowRun,
    task: str = "Alice",
    *,
    strategy: str = "none",
    orders: str = "",
    leak: str = "both",
    rounds: int = 2,
    guard: bool = False,
) -> Message:
    """Play the game; record both decisions and Bob's prediction.

    Returns Bob's decision.

    Args:
        task: the player who speaks first.
        strategy: key of `STRATEGIES`, whose sentence is added to Alice's instructions.
        orders: further text of Alice's instructions.
        leak: one of `LEAKS`.
        rounds: number of rounds of talk.
        guard: nothing of one player's instructions and plan reaches the other's distributions.
    """
    first = task.strip().capitalize()
    check_choices(task=(first, NAMES), strategy=(strategy, STRATEGIES), leak=(leak, LEAKS))
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: use 1 or more")
    if guard and leak != "both":
        raise ConfigError(
            f"guard=True with leak={leak!r}, which encodes Alice's messages again itself: use leak='both'"
        )
    clearances = {name: {"clearance": {f"{name}-private"}} if guard else {} for name in NAMES}
    orders = STRATEGIES[strategy] + (f"\n{orders}" if orders else "")
    private = {
        "Alice": private_context(wf, "Alice", "Bob", orders, clearances["Alice"]),
        "Bob": private_context(wf, "Bob", "Alice", "", clearances["Bob"]),
    }
    received: dict[str, list[Message]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for player in NAMES if first == "Alice" else NAMES[::-1]:
            context = [*private[player], *received[player]]
            message = wf.decode(
                f"{player} says", wf.assistant(f"{player}:"), context, max_tokens=48, **clearances[player]
            )
            recompute = player == "Alice" and leak != "both"
            for_bob = recompute_for_bob(wf, message, leak, private["Alice"], received) if recompute else message
            received["Alice"].append(message)
            received["Bob"].append(for_bob)
    answers = {
        (player, action): final_question(wf, action, player, [*private[player], *received[player]], clearances[player])
        for player, action in (("Alice", "decides"), ("Bob", "decides"), ("Bob", "predicts"))
    }
    for (player, action), message in answers.items():
        decision = first_decision(message.text)
        if decision is None:
            wf.record_parse_failure(f"{player} {action}")
        wf.record(f"{player} {action}", decision)
    return answers["Bob", "decides"]


def private_context(
    wf: WorkflowRun, player: str, opponent: str, extra_instructions: str, clearance: dict[str, Any]
) -> list[Message]:
    """Return one player's private messages: instructions, plan prompt, plan, talk prompt.

    With a clearance, instructions and plan have its label.
    """
    names = {"me": player, "other": opponent}
    private = {"labels": clearance["clearance"], **clearance} if clearance else {}
    system = wf.prefill(f"{player} system", wf.system(RULES.format(**names) + extra_instructions), **private)
    think = wf.prefill("plan prompt", wf.user(PLAN.format(**names)), [system], **clearance)
    plan = wf.decode(f"{player} plans", wf.assistant("My plan:"), [system, think], max_tokens=80, **private)
    talk = wf.prefill("talk prompt", wf.user(TALK.format(**names)), [system, think, plan], **clearance)
    return [system, think, plan, talk]


def recompute_for_bob(
    wf: WorkflowRun, message: Message, leak: str, private: list[Message], received: dict[str, list[Message]]
) -> Message:
    """Recompute Alice's message for Bob at the same position, with less context."""
    system, _, plan, _ = private
    parents = [system if leak == "system" else wf.prefill("opening", wf.system(OPENING))]
    offsets = [0]
    if leak == "plan":  # a copy that does not attend to her instructions
        parents.append(wf.prefill("plan retold", plan.tokens, parents, new_offset=plan.position))
        offsets.append(plan.position)
    positions = {parent.id: offset for parent, offset in zip(message.parents, message.offsets, strict=True)}
    parents += received["Bob"]
    offsets += [positions[own.id] for own in received["Alice"]]
    return wf.prefill("retold", message.tokens, parents, offsets=offsets, new_offset=message.position)


def final_question(
    wf: WorkflowRun, action: str, player: str, context: list[Message], clearance: dict[str, Any]
) -> Message:
    """Ask what the player decides, or predicts that the other will do."""
    other = NAMES[player == "Alice"]
    prompt, subject = (DECIDE, player) if action == "decides" else (PREDICT, other)
    question = wf.prefill(f"{action} prompt", wf.user(prompt.format(me=player, other=other)), context, **clearance)
    parents = [*context, question]
    return wf.decode(f"{player} {action}", wf.assistant(f"{subject} will"), parents, max_tokens=8, **clearance)
