"""Source files as modules (Prompt Cache, section 5.6.1): each prompt imports the files that it is about."""

from pathlib import Path

from choreograph import Engine
from choreograph.prompt_cache import PromptCache
from choreograph.prompt_cache.compare import side_by_side

PROMPTS = [
    """<prompt schema="game"><board.py/><player.py/><game.py/>
    <user>Write a main function that plays one game between two players and prints the winner.</user></prompt>""",
    """<prompt schema="game"><scores.py/>
    <user>Write two lines that add a win for "ann" to the scores in "wins.json".</user></prompt>""",
]

if __name__ == "__main__":
    schema = Path(__file__).parent / "pml" / "game" / "game.pml"
    with PromptCache(Engine.from_pretrained(), schema) as cache:
        for prompt in PROMPTS:
            print(side_by_side(cache, prompt))
