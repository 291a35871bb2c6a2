"""A reader's profile as six unions (Prompt Cache, section 5.6.2): at most one trait of each, in any combination."""

from pathlib import Path

from choreograph import Engine, SamplingParams
from choreograph.prompt_cache import Import, Prompt, PromptCache, Role

READERS = {
    "a curious child": ("child", "adventure"),
    "a reader of pictures": ("pictures", "adventure"),
    "a retired engineer": ("retired", "history"),  # more traits at once need a larger model than the bundled one
}


def prompt(traits: tuple[str, ...]) -> Prompt:
    ask = Role("user", ("The last five loans were of which kind?",))
    return Prompt("reader", (*map(Import, traits), ask))


SAMPLING = SamplingParams(temperature=0, max_tokens=48)

if __name__ == "__main__":
    schema = Path(__file__).parent / "pml" / "reader.pml"
    with PromptCache(Engine.from_pretrained(), schema) as cache:
        cache.warmup()
        for name, traits in READERS.items():
            for mode in ("choreographed", "naive"):  # from modules, and the same text computed anew
                with cache.engine.session(mode=mode) as session:
                    answer = cache.generate(session, prompt(traits), sampling=SAMPLING)
                    print(
                        f"-- {name}, {mode}: first token after {answer.timing.ttft * 1e3:.0f} ms\n{answer.text.strip()}\n"
                    )
