import json
from pathlib import Path


class Scores:
    """How often each player won, kept in a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.wins = json.loads(self.path.read_text()) if self.path.exists() else {}

    def add(self, name: str) -> None:
        self.wins[name] = self.wins.get(name, 0) + 1
        self.path.write_text(json.dumps(self.wins))
