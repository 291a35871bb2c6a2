"""A trip with parameters and nested unions (Prompt Cache, section 5.6.3), as a Python function instead of PML."""

from choreograph import Engine, SamplingParams
from choreograph.prompt_cache import Param, PromptCache, Role, assistant, program, system, user


@program
def trip(plan: bool, days: Param(5), place: str, town: Param(8), season: str):
    with system:
        "You are a travel agent who answers in short, concrete sentences."
    with user:
        if plan:
            f"I am planning a journey of {days} and want to see as much as I can without hurry. "
            match place:
                case "at-home":
                    f"I stay in my own country and start from {town}, so that I can go by train. "
                case "coast":
                    "I go to the sea: I want to swim before breakfast and eat fish in the evening. "
                case "mountains":
                    "I go to the mountains: I want to walk from hut to hut and sleep early. "
            match season:
                case "summer":
                    "It will be hot, so I need shade at noon."
                case "winter":
                    "It will be cold and dark early, so I need warm places in the afternoon."
    with assistant:
        "I have understood your wishes."


ASK = Role("user", ("Plan the first day for me.",))
SAMPLING = SamplingParams(temperature=0, max_tokens=48)

if __name__ == "__main__":
    with PromptCache(Engine.from_pretrained(), trip.schema) as cache:
        cache.warmup()
        for choice in ({"days": "one week", "place": "coast"}, {"days": "three days", "place": "mountains"}):
            for mode in ("choreographed", "naive"):  # from modules, and the same text computed anew
                with cache.engine.session(mode=mode) as session:
                    answer = cache.generate(session, trip(ASK, plan=True, season="summer", **choice), sampling=SAMPLING)
                    print(f"-- {mode}: first token after {answer.timing.ttft * 1e3:.0f} ms\n{answer.text.strip()}\n")
