import random


class Player:
    """Somebody who chooses a free cell."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name = name
        self.random = random.Random(seed)

    def move(self, board: "Board") -> tuple[int, int]:
        free = [(r, c) for r in range(board.size) for c in range(board.size) if not board.cells[r][c]]
        return self.random.choice(free)
