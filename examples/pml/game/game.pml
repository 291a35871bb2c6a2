<!-- Every source file is a module: a prompt imports the files that it needs, as code does. -->
<schema name="game">
  <system>You are a careful Python programmer. Answer with short code.</system>
  <user>
    Here are source files of a program.
    <module name="board.py" src="board.py"/>
    <module name="player.py" src="player.py"/>
    <module name="game.py" src="game.py"/>
    <module name="scores.py" src="scores.py"/>
  </user>
  <assistant>I have read the files.</assistant>
</schema>
