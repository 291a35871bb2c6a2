"""The command line as its users see it: help, JSON, pipes, errors, one real run of the demo."""

import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from helpers.command_line import app
from rich.console import Console
from typer.testing import CliRunner

from choreograph.cli.main import run_app
from choreograph.console import make_console, print_table
from choreograph.errors import ConfigError, ModelError
from choreograph.features.repair import align
from choreograph.lab.commands.demo import run_demo
from choreograph.lab.evaluation import calibration
from choreograph.utils import atomic_write_text

runner = CliRunner()


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["info"],
        ["demo"],
        ["run"],
        ["eval"],
        ["bench"],
        ["chat"],
        ["calibrate"],
        ["proxy"],
        ["layer-reuse", "profile"],
    ],
)
def test_help_is_there_for_everything(command):
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "--help" in result.output
    if command in (["run"], ["chat"]):
        assert all(
            option in re.sub(r"\x1b\[[0-9;]*m", "", result.output)
            for option in ("--model", "--mode", "--dtype", "--json")
        )


@pytest.mark.parametrize(
    ("name", "earlier"),
    [("prompt-cache", "pml"), ("step-graph", "graph"), ("layer-reuse", "reuse"), ("autotune", "tune")],
)
def test_earlier_names_of_commands_work_and_are_hidden(name, earlier):
    listed = re.findall(r"^│ ([a-z-]+) ", runner.invoke(app, ["--help"]).output, re.MULTILINE)
    assert name in listed and earlier not in listed
    new, old = (runner.invoke(app, [command, "--help"]).output for command in (name, earlier))
    assert old.splitlines()[2:] and old.replace(f" {earlier} ", f" {name} ").split() == new.split()


def test_python_dash_m_works():
    done = subprocess.run([sys.executable, "-m", "choreograph", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "demo" in done.stdout


def test_info_in_a_pipe_and_as_json():
    plain = runner.invoke(app, ["info"])
    assert plain.exit_code == 0
    assert "smollm2-135m-instruct" in plain.output
    assert "\x1b" not in plain.output
    facts = json.loads(runner.invoke(app, ["info", "--json", "--dtype", "float32"]).output)
    assert facts["cache bytes per token"] == 46080
    assert facts["layers by attention"] == "30 rotary on 64 dimensions"
    assert facts["largest context in the cache"] <= facts["positions"] == 8192
    assert facts["largest context in free memory"] > 0


def test_calibrate_stores_the_numbers_of_a_model(tmp_path, talker_folder, monkeypatch):
    monkeypatch.setattr(align, "calibrations_file", lambda: tmp_path / "alignments.json")
    monkeypatch.setattr(calibration, "TEMPERATURES", (0.9, 1.0))
    monkeypatch.setattr(calibration, "NUM_REFINEMENTS", 1)
    data = tmp_path / "own.jsonl"
    records = [{"question": "who?", "documents": [{"title": t, "text": t * 9}]} for t in ("a", "b", "c")]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = runner.invoke(app, ["calibrate", talker_folder, "--data", str(data), "--dtype", "float32", "--json"])
    facts = json.loads(result.output)
    assert facts["kl"] <= facts["kl_of_reuse"] and facts["n"] == 3
    (stored,) = json.loads((tmp_path / "alignments.json").read_text()).values()
    assert (stored["temperature"], stored["scale"]) == (facts["temperature"], facts["scale"])
    data.write_text('{"question": "who?"}\n')
    assert "not JSON Lines of question and documents" in str(
        runner.invoke(app, ["calibrate", talker_folder, "--data", str(data)]).exception
    )


def test_models_lists_what_is_proved_with_its_test():
    shown = runner.invoke(app, ["models"]).output
    listed = json.loads(runner.invoke(app, ["models", "--json"]).output)
    for name, facts in listed.items():
        assert name in shown
        assert Path(facts["test"]).is_file()


def test_the_demo_answers_questions_in_three_ways(tmp_path, talker_folder):
    picture = tmp_path / "questions.svg"
    result = runner.invoke(app, ["demo", "--model", talker_folder, "--svg", str(picture), "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.output)["summary"]
    prefix, reuse, repaired = (summary[name]["computed_tokens"] for name in summary)
    assert reuse < repaired < prefix / 2
    assert "first token" in picture.read_text()


@pytest.mark.usefixtures("brief")
def test_the_demo_of_a_tree_repeats_the_content_and_draws_the_graph(tmp_path, talker_folder):
    picture = tmp_path / "graph.svg"
    small = [
        "--workflow",
        "tree_of_thoughts",
        "--branches",
        "2",
        "--voters",
        "2",
        "--pairs",
        "2",
        "--model",
        talker_folder,
    ]
    result = runner.invoke(app, ["demo", *small, "--svg", str(picture), "--json"])
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.output)
    assert numbers["same_tokens"]
    assert len(numbers["e2e_ratios"]) == 2
    encoded = {mode: sum(s["encoded"] for s in numbers[mode]["stages"]) for mode in ("prefix", "choreographed")}
    assert encoded["choreographed"] < encoded["prefix"]
    drawn = picture.read_text()
    assert drawn.startswith("<?xml") and "<svg" in drawn
    assert "stroke-dasharray" in drawn, "voters see branches that were moved"


def test_run_a_workflow_of_the_package_and_of_a_file(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from choreograph import Turn\n"
        "def run(p, task, *, word='Yes'):\n"
        "    asked = p.prefill('ask', Turn('user', task))\n"
        "    return p.decode('reply', Turn('assistant', word), [asked])\n"
    )
    result = runner.invoke(
        app,
        [
            "run",
            str(own),
            "--task",
            "Say it.",
            "--option",
            "word=No",
            "--max-tokens",
            "5",
            "--mode",
            "prefix",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    got = json.loads(result.output)
    assert got["mode"] == "prefix"
    assert got["stages"][-1]["generated"] <= 5
    result = runner.invoke(
        app, ["run", "tree_of_thoughts", "--option", "branches=2", "--max-tokens", "6"], input="2 + 2?"
    )
    assert result.exit_code == 0, result.output
    assert "vote" in result.output


OWN = """
def run(p, task):
    asked = p.prefill("ask", p.user(task))
    drafts = [p.decode("draft", p.assistant(), [asked], forced_tokens=text) for text in ("first draft", "second")]
    p.decode("vote", p.assistant(), [asked, *drafts], forced_tokens="nothing")
    p.record_parse_failure("vote")
    return p.decode("answer", p.assistant(), [asked], forced_tokens=ANSWER)
"""


@pytest.mark.parametrize(
    ("answer", "shown"), [("'the answer'", "Answer:the answer"), ("'  '", "(empty"), ("[2]", "(empty")]
)
def test_run_shows_branches_votes_parse_failures_and_an_empty_answer(answer, shown, tmp_path, talker_folder):
    own = tmp_path / "own.py"
    own.write_text(OWN.replace("ANSWER", answer))
    arguments = ["run", str(own), "--task", "Say it.", "--model", talker_folder]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for line in ("[draft 1] first draft", "[draft 2] second", "[vote 1] nothing", shown):
        assert line in result.output
    assert "could not be parsed: 1 of 1 calls of stage 'vote'" in result.output
    alone = runner.invoke(app, [*arguments, "--quiet"])
    assert alone.exit_code == 0 and alone.output == ("the answer\n" if "answer" in answer else "\n")
    found = json.loads(runner.invoke(app, [*arguments, "--json"]).output)
    assert [call["text"] for call in found["generated"]][:3] == ["first draft", "second", "nothing"]
    assert found["unparseable"] == {"vote": 1}


@pytest.mark.slow
def test_loading_prints_no_progress_of_transformers(talker_folder):
    done = subprocess.run(
        [sys.executable, "-m", "choreograph", "info", "--model", talker_folder],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr.count("\n") <= 1, done.stderr
    assert "Loading weights" not in done.stdout + done.stderr


IMPORTS = """
import gc, sys
from choreograph.cli.common import open_engine
engine = open_engine({folder!r}, "float32")
unused = ("transformers.models.bloom", "choreograph.models.compilation", "choreograph.models.gguf.gguf_tokenizer")
print([name for name in sys.modules if name.startswith(unused)], gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


def test_a_start_imports_what_it_needs_and_keeps_it_from_garbage_collection(talker_folder):
    code = IMPORTS.format(folder=str(talker_folder))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (result.stdout, result.stderr) == ("[] True True\n", "")


def test_chat_reads_lines_until_the_input_ends():
    result = runner.invoke(
        app, ["chat", "--max-tokens", "4", "--json", "--system", "Be brief."], input="Hello\n/reset\nBye\n"
    )
    assert result.exit_code == 0, result.output
    replies = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    assert len(replies) == 2
    assert all(reply["generated"] <= 4 for reply in replies)


def test_a_turn_that_is_dropped_is_a_line_of_json_too(talker_folder):
    arguments = ["chat", "--max-tokens", "4", "--json", "--model", talker_folder]
    result = runner.invoke(app, arguments, input="word " * 9000 + "\n/reset\nBye\n")
    first, second = map(json.loads, result.output.splitlines())
    assert "dropped" in first["error"] and second["generated"] <= 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "no_such_workflow", "--task", "x"], ["no_such_workflow", "tree_of_thoughts"]),
        (["info", "--model", "./nowhere"], ["nowhere"]),
        (["run", "tree_of_thoughts", "--task", "x", "--model", "broken.gguf"], ["broken.gguf"]),
    ],
)
def test_an_error_is_one_line_and_no_traceback(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_app(lambda: app(arguments, standalone_mode=False))
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert all(word in said for word in words)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("step-graph show g.yaml --svg folder", "folder: is a directory"),
        ("step-graph show g.yaml --svg file/x.svg", "file: directory cannot be created"),
        ("prompt-cache show s.pml --svg folder", "folder: is a directory"),
        ("prompt-cache warm s.pml --save folder", "folder: is a directory"),
        ("step-graph show tree_of_thoughts", "tree_of_thoughts: no such step-graph file; write one in YAML"),
        ("graph show folder", "folder: not a step-graph file; write one in YAML"),
        ("step-graph show broken.py", "broken.py: not a step-graph file; write one in YAML"),
        ("layer-reuse show latin", "latin: no profile"),
        ("eval single_call --data latin", "latin, line 1: not JSON in UTF-8"),
        ("run broken.py --task x", "broken.py, line 2: "),
    ],
)
def test_a_file_that_cannot_be_read_or_written_is_one_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    (tmp_path / "g.yaml").write_text("agents:\n  a:\n  b: a\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef run(p, task\n")
    with pytest.raises(SystemExit) as stopped:
        run_app(lambda: app(arguments.split(), standalone_mode=False))
    assert stopped.value.code == 1
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_a_picture_is_drawn_into_a_folder_that_is_made(tmp_path):
    (tmp_path / "g.yaml").write_text("agents:\n  a:\n  b: a\n")
    picture = tmp_path / "new" / "x.svg"
    result = runner.invoke(app, ["step-graph", "show", str(tmp_path / "g.yaml"), "--svg", str(picture)])
    assert result.exit_code == 0 and "<svg" in picture.read_text()


def test_a_path_is_not_broken_in_a_pipe(tmp_path, capsys, talker_folder):
    (tmp_path / "g.yaml").write_text("agents:\n  a:\n")
    for path in (tmp_path / ("long " * 30) / "g.yaml", tmp_path / "no" / ("x" * 90)):
        with pytest.raises(SystemExit):
            run_app(lambda path=path: app(["step-graph", "show", str(path)], standalone_mode=False))
        assert str(path) in capsys.readouterr().err
    (tmp_path / "s.pml").write_text('<schema name="s"><module name="a">hello</module></schema>')
    picture = tmp_path / ("long " * 30) / "x.svg"
    arguments = ["prompt-cache", "show", str(tmp_path / "s.pml"), "--model", talker_folder, "--svg", str(picture)]
    result = runner.invoke(app, arguments)
    assert f"drawn to {picture}\n" in result.output


def test_a_table_on_a_narrow_terminal_names_its_lines():
    console = Console(file=StringIO(), force_terminal=True, width=80, no_color=True)
    lines = [
        ("Gemma3ForCausalLM", "local, " * 12, "norms of queries " * 6, "tests/models/test_families.py", "1234567 ms")
    ]
    print_table(console, "t", ("architecture", "positions", "what", "proof", "time"), lines, num_text_columns=4)
    print_table(console, "[b]", ("name", *"abcdefgh"), [("a long name [/b]", *8 * ["a number"])])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    assert "Gemma3ForCausalLM" in shown and "1234567 ms" in shown and "a long name [/b]" in shown
    assert shown.count("local") == 12 and shown.count("queries") == 6
    assert max(len(line) for line in shown.splitlines() if "┃" not in line) <= 80


def test_a_graph_keeps_its_names_on_a_narrow_terminal(tmp_path, monkeypatch):
    agents = {"planner-with-a-long-name": None, "coder": "planner-with-a-long-name"}
    agents["reviewer"] = {"all_of": ["planner-with-a-long-name", {"any_of": ["coder", "planner-with-a-long-name"]}]}
    (tmp_path / "g.json").write_text(json.dumps(agents))
    console = Console(file=StringIO(), force_terminal=True, width=60, no_color=True)
    monkeypatch.setattr("choreograph.cli.step_graph_commands.make_console", lambda: console)
    runner.invoke(app, ["step-graph", "show", str(tmp_path / "g.json")])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    assert all(name in shown for name in agents) and "all of" in shown and "(any of" in shown
    assert all(f"│     {steps} │" in shown for steps in (1, 2))


def test_what_happened_may_name_agents_with_spaces(tmp_path):
    (tmp_path / "g.yaml").write_text("the first, of two:\nb: the first, of two\n")
    for events in ("+the first, of two,-the first, of two,+b", " +the first, of two -the first, of two +b"):
        result = runner.invoke(app, ["step-graph", "show", str(tmp_path / "g.yaml"), "--json", "--after", events])
        assert json.loads(result.output) == {"the first, of two": None, "b": 0}


def test_wide_characters_are_aligned_in_a_pipe():
    console = Console(file=StringIO())
    print_table(console, "t", ("name", "n"), [("エージェント", "1"), ("b", "20")])
    assert console.file.getvalue().splitlines()[1:] == ["name           n", "エージェント   1", "b             20"]


def test_the_demo_refuses_a_picture_before_it_measures(tmp_path):
    with pytest.raises(ConfigError, match="is a directory"):
        run_demo(None, make_console(quiet=True), svg_path=tmp_path)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (PermissionError(13, "Permission denied", "some/file"), "some/file: Permission denied"),
        (OSError("the disk is\ngone"), "the disk is gone"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "not UTF-8: "),
        (ModelError("no such model"), "no such model"),
    ],
)
def test_errors_of_files_are_one_line(problem, said, capsys):
    def command():
        raise problem

    with pytest.raises(SystemExit):
        run_app(command)
    told = capsys.readouterr().err
    assert told.startswith(f"error: {said}") and told.count("\n") == 1


def test_bad_options_name_themselves():
    for arguments in (["run", "tree_of_thoughts", "--task", "x", "--option", "branches"], ["demo", "--branches", "0"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 2
        assert "branches" in re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def test_texts_are_shown_as_they_are(capsys):
    make_console().print("Use :key: and :x:", markup=False)
    assert capsys.readouterr().out == "Use :key: and :x:\n"


@pytest.mark.slow
def test_characters_that_the_output_has_no_code_for_are_replaced(talker_folder):
    done = subprocess.run(
        [sys.executable, "-m", "choreograph", "chat", "--model", talker_folder, "--max-tokens", "200"],
        input=b"hi\n",
        capture_output=True,
        timeout=180,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0 and b"?" in done.stdout, done.stderr


def test_a_line_that_holds_half_a_character_is_dropped_alone(talker_folder, monkeypatch):
    lines = iter(["hi", "h\udce9llo", "there", ""])
    monkeypatch.setattr("choreograph.cli.engine_commands._read_line", lambda console: next(lines))
    result = runner.invoke(app, ["chat", "--model", talker_folder, "--max-tokens", "4", "--json"])
    said = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    assert result.exit_code == 0 and ["error" in one for one in said] == [False, True, False]


def test_a_system_prompt_beyond_the_context_is_told_before_anybody_talks(talker_folder):
    result = runner.invoke(app, ["chat", "--model", talker_folder, "--system", "word " * 20000], input="hi\n")
    assert isinstance(result.exception, ConfigError) and "--system" in str(result.exception)


@pytest.mark.slow
def test_closed_streams_are_told_in_a_line(talker_folder):
    whole = f"{sys.executable} -m choreograph"
    lost = subprocess.run(f"{whole} models >&-", shell=True, capture_output=True, text=True, timeout=120)
    assert lost.returncode == 1 and "standard output is closed" in lost.stderr and "Traceback" not in lost.stderr
    mute = subprocess.run(
        f"{whole} chat --model {talker_folder} <&-", shell=True, capture_output=True, text=True, timeout=120
    )
    assert mute.returncode == 0 and "Traceback" not in mute.stderr, mute.stderr


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "old.svg"
    file.write_text("old")
    write = Path.write_text

    def full(self, text, **options):
        write(self, text[:1], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match=r"old\.svg.*No space left"):
        atomic_write_text(file, "new")
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]
