"""Source files as modules (Prompt Cache, section 5.6.1): each prompt imports the files that it is about."""

from pathlib import Path

from choreograph import Engine, SamplingParams
from choreograph.prompt_cache import PromptCache

PROMPTS = [
    """<prompt schema="game"><board.py/><player.py/><game.py/>
    <user>Write a main function that plays one game between two players and prints the winner.</user></prompt>""",
    """<prompt schema="game"><scores.py/>
    <user>Write two lines that add a win for "ann" to the scores in "wins.json".</user></prompt>""",
]
SAMPLING = SamplingParams(temperature=0, max_tokens=48)

if __name__ == "__main__":
    schema = Path(__file__).parent / "pml" / "game" / "game.pml"
    with PromptCache(Engine.from_pretrained(), schema) as cache:
        cache.warmup()
        for prompt in PROMPTS:
            for mode in ("choreographed", "naive"):  # from modules, and the same text computed anew
                with cache.engine.session(mode=mode) as session:
                    answer = cache.generate(session, prompt, sampling=SAMPLING)
                    print(f"-- {mode}: first token after {answer.timing.ttft * 1e3:.0f} ms\n{answer.text.strip()}\n")
