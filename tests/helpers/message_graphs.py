"""Random message graphs: what is called, with which parents, where. Knows neither engine nor oracle."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

VOCABULARY, POSITIONS = 61, 160


@dataclass
class Node:
    """One call. offsets and start may be None (default rule). generated: forced tokens of a decode, else None."""

    tokens: list[int]
    parents: list[int] = field(default_factory=list)
    offsets: list[int | None] = field(default_factory=list)
    position: int | None = None
    generated: list[int] | None = None
    footer: list[int] = field(default_factory=list)

    @property
    def all_tokens(self) -> list[int]:
        return self.tokens + (self.generated or []) + (self.footer if self.generated else [])


tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)
positions = st.one_of(st.none(), st.integers(0, 90))


@st.composite
def graphs(draw, max_nodes: int = 6) -> list[Node]:
    """Calls in an order in which parents come first; gaps, overlaps, reorderings and negative distances occur."""
    nodes: list[Node] = []
    for index in range(draw(st.integers(1, max_nodes))):
        parents = draw(st.lists(st.integers(0, index - 1), unique=True, max_size=4)) if index else []
        decodes = draw(st.booleans())
        nodes.append(
            Node(
                tokens=draw(tokens),
                parents=parents,
                offsets=[draw(positions) for _ in parents],
                position=draw(positions),
                generated=draw(tokens) if decodes else None,
                footer=draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2)) if decodes else [],
            )
        )
    return nodes


def default_placements(nodes: list[Node]) -> list[tuple[list[int], int]]:
    """The default rule, worked out by hand: (offset of each parent, start) of every node."""
    result = []
    for node in nodes:
        at, offsets = 0, []
        for parent, offset in zip(node.parents, node.offsets, strict=True):
            here = at if offset is None else offset
            offsets.append(here)
            at = here + len(nodes[parent].all_tokens)
        result.append((offsets, at if node.position is None else node.position))
    return result
