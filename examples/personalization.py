"""A reader's profile as six unions (Prompt Cache, section 5.6.2): one trait of each, in any combination."""

from pathlib import Path

from choreograph import Engine
from choreograph.prompt_cache import Import, Prompt, PromptCache, Role
from choreograph.prompt_cache.compare import side_by_side

READERS = {
    "a curious child": ("child", "no-knowledge", "evenings", "pictures", "adventure", "impatient"),
    "a retired engineer": ("retired", "expert", "all-day", "reading", "history", "thorough"),
}


def prompt(traits: tuple[str, ...]) -> Prompt:
    ask = Role("user", ("Describe this reader in two sentences.",))
    return Prompt("reader", (*map(Import, traits), ask))


if __name__ == "__main__":
    schema = Path(__file__).parent / "pml" / "reader.pml"
    with PromptCache(Engine.from_pretrained(), schema) as cache:
        for name, traits in READERS.items():
            print(f"== {name}\n{side_by_side(cache, prompt(traits))}")
