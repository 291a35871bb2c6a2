"""Random schemas, and random prompts that follow them."""

import string

from hypothesis import strategies as st

from choreograph.prompt_cache import Import, Module, Parameter, Prompt, Role, Scaffold, Schema, Union

texts = st.text(string.ascii_letters + " .<&>\n", min_size=1, max_size=7)


@st.composite
def schemas(draw, *, scaffolds: bool = False) -> Schema:
    """Nested modules, unions, turns and parameters; names are unique in the whole schema."""
    names = iter(f"m{number}" for number in range(1000))

    def children(depth: int, in_role: bool) -> tuple:
        kinds = ["text", "text", "parameter"]
        kinds += ["module", "union", "scaffold" if scaffolds else "module"] if depth < 3 else []
        kinds += [] if in_role else ["role"]
        return tuple(one(draw(st.sampled_from(kinds)), depth, in_role) for _ in range(draw(st.integers(0, 3))))

    def module(depth: int, in_role: bool) -> Module:
        return Module(next(names), children(depth + 1, in_role), cache=draw(st.integers(0, 5)) > 0)

    def one(kind: str, depth: int, in_role: bool):
        if kind == "text":
            return draw(texts)
        if kind == "parameter":
            return Parameter(next(names), draw(st.integers(1, 5)))
        if kind == "module":
            return module(depth, in_role)
        if kind == "union":
            return Union(tuple(module(depth, in_role) for _ in range(draw(st.integers(1, 3)))))
        if kind == "scaffold":
            return Scaffold(tuple(module(depth, in_role) for _ in range(draw(st.integers(1, 3)))))
        return Role(draw(st.sampled_from(["system", "user", "assistant"])), children(depth, True))

    return Schema("random", children(0, False))


@st.composite
def prompts(draw, schema: Schema) -> Prompt:
    """Imports in any order with all arguments, and something said behind them."""

    def level(children) -> tuple[list[Import], dict[str, str]]:
        imports, arguments = [], {}
        for child in children:
            if isinstance(child, Parameter):
                arguments[child.name] = draw(st.text("abc ", min_size=0, max_size=child.length))
            elif isinstance(child, (Role, Scaffold)):
                more, filled = level(child.children)
                imports += more
                arguments |= filled
            elif isinstance(child, (Module, Union)) and draw(st.booleans()):
                member = child if isinstance(child, Module) else draw(st.sampled_from(child.members))
                inside, filled = level(member.children)
                imports.append(Import(member.name, tuple(inside), filled))
        return draw(st.permutations(imports)), arguments

    imports, arguments = level(schema.children)
    said = draw(st.sampled_from([(Role("user", ("Go.",)),), ("and ", Role("user", ("so?",)))]))
    return Prompt(schema.name, (*imports, *said), arguments)
