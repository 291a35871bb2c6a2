class Game:
    """Two players take turns on a board until one wins or the board is full."""

    def __init__(self, board: "Board", players: list["Player"]) -> None:
        self.board = board
        self.players = players

    def play(self) -> str:
        turn = 0
        while not self.board.winner() and not self.board.full():
            player = self.players[turn % len(self.players)]
            self.board.place(*player.move(self.board), player.name)
            turn += 1
        return self.board.winner()
