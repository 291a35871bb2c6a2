class Board:
    """A square grid; cells hold the name of a player or nothing."""

    def __init__(self, size: int = 3) -> None:
        self.size = size
        self.cells = [["" for _ in range(size)] for _ in range(size)]

    def place(self, row: int, column: int, name: str) -> bool:
        if not (0 <= row < self.size and 0 <= column < self.size) or self.cells[row][column]:
            return False
        self.cells[row][column] = name
        return True

    def full(self) -> bool:
        return all(cell for row in self.cells for cell in row)

    def winner(self) -> str:
        n = self.size
        lines = [*self.cells, *zip(*self.cells, strict=True)]
        lines += [[self.cells[i][i] for i in range(n)], [self.cells[i][n - 1 - i] for i in range(n)]]
        for line in lines:
            if line[0] and all(cell == line[0] for cell in line):
                return line[0]
        return ""
