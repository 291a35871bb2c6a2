"""Changes to the files of a valid input, by the structure of their format.

A file is text, JSON, YAML, GGUF or a container with a JSON header (safetensors, saved KV). Structured formats are parsed,
changed at a random place, and written again; any file may also be changed as bytes.
"""

import copy
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

CANARY_COMMAND = "touch {canary}"  # what a hostile file tries to run; the campaign looks for the file

NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    7,
    64,
    255,
    1 << 16,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    1 << 40,
    (1 << 63) - 1,
    1 << 64,
)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-45, 1e38, 1e308, float("inf"), float("-inf"), float("nan"))
U32 = (0, 1, 2, 3, 5, 8, 12, 255, 1 << 16, 1 << 24, 1 << 28, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
U64 = (*U32, 1 << 32, 1 << 33, 1 << 40, 1 << 47, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def hostile_texts(canary: str) -> tuple[str, ...]:
    """Return strings that escape, run, or break a parser; canary: a file outside the folder, which must not appear."""
    run = f"__import__('os').system('touch {canary}')"
    return (
        *(
            "",
            " ",
            "\0",
            "a\0b",
            "\ud800",
            "\u202e",
            "é" * 3,
            "x" * 100_000,
            "None",
            "NaN",
            "true",
            "1e999",
            "{}",
            "[",
            "%n%s",
        ),
        *(
            "..",
            "../../../../etc/passwd",
            "/etc/passwd",
            f"../{canary}",
            canary,
            f"file://{canary}",
            "~/x",
            "C:\\x",
            "/dev/zero",
        ),
        *(run, f"eval({run!r})", f"os.system('touch {canary}')", f"$(touch {canary})", f"`touch {canary}`"),
        *(
            "{{ 1 / 0 }}",
            "{% for x in range(999999999) %}{% endfor %}",
            "{{ ''.__class__.__mro__ }}",
            "{{ cycler.__init__ }}",
        ),
        *("auto_map", "torch.load", "numpy.core.multiarray", "builtins.exec", "<|endoftext|>", "<unk>", "</s>"),
    )


def hostile_keys(canary: str) -> dict[str, Any]:
    """Return members that some readers treat as instructions."""
    return {
        "auto_map": {
            "AutoConfig": "evil.Config",
            "AutoModelForCausalLM": "evil.Model",
            "AutoTokenizer": ["evil.Slow", "evil.Fast"],
        },
        "trust_remote_code": True,
        "architectures": ["EvilForCausalLM"],
        "model_type": "bert",
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "torch_dtype": "object",
        "dtype": "int8",
        "_name_or_path": canary,
        "attn_implementation": canary,
        "tokenizer_class": "EvilTokenizer",
        "processor_class": "EvilProcessor",
        "__class__": "os.system",
        "py/object": "os.system",
        "!!python/object/apply:os.system": [f"touch {canary}"],
        "transformers_weights": canary,
        "tie_word_embeddings": None,
        "num_hidden_layers": 1 << 20,
        "vocab_size": 1 << 31,
        "hidden_size": 1 << 20,
        "pad_token_id": -5,
        "rope_scaling": {"type": "linear", "factor": 0},
    }


class Mutator:
    """Random changes to files.

    Args:
        rng: the only source of chance.
        canary: path of a file that no reader may open or create.
        others: contents of files of other kinds, to be swapped in.
    """

    def __init__(self, rng: random.Random, canary: str, others: list[bytes]) -> None:
        self.rng, self.canary, self.others = rng, canary, others
        self.texts, self.keys = hostile_texts(canary), hostile_keys(canary)

    def mutate(self, name: str, data: bytes) -> bytes:
        """Return changed contents of a file.

        Args:
            name: decides the format by its suffix.
        """
        draw = self.rng.random()
        if draw < 0.02:
            return self.rng.choice(self.others)
        if draw < 0.12:
            return self.mutate_bytes(data)
        suffix = name.rpartition(".")[2]
        try:
            return _BY_SUFFIX.get(suffix, Mutator.mutate_text)(self, data)
        except (ValueError, RecursionError, struct.error, UnicodeError):  # of what an earlier change left
            return self.mutate_bytes(data)

    # -- bytes and text -----------------------------------------------------------------------------------

    def mutate_bytes(self, data: bytes) -> bytes:
        """Truncate, flip, repeat, remove or insert bytes."""
        rng = self.rng
        start, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 64, 1024))
        noise = rng.choice((b"\0" * length, b"\xff" * length, rng.randbytes(length), b"\xef\xbb\xbf", b"\r\n", b"\xc3"))
        match rng.randrange(6):
            case 0:
                return data[:start]
            case 1:
                flipped = bytearray(data or b"\0")
                for _ in range(rng.choice((1, 1, 4, 32))):
                    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
                return bytes(flipped)
            case 2:
                return data[:start] + data[start : start + length] * rng.choice((2, 3, 100)) + data[start + length :]
            case 3:
                return data[:start] + data[start + length :]
            case 4:
                return data[:start] + noise + data[start:]
        return rng.choice((b"", noise, noise + data, data + noise, data + data))

    def mutate_text(self, data: bytes) -> bytes:
        """Replace a word, a line or a number of a text."""
        rng, text = self.rng, data.decode(errors="surrogateescape")
        lines = text.split("\n")
        index = rng.randrange(len(lines))
        match rng.randrange(5):
            case 0:
                lines[index] = rng.choice(self.texts)
            case 1:
                lines.insert(index, lines[rng.randrange(len(lines))])
            case 2:
                del lines[index]
            case 3:
                words = lines[index].split(" ")
                words[rng.randrange(len(words))] = rng.choice((*self.texts, *map(str, NUMBERS)))
                lines[index] = " ".join(words)
            case 4:
                depth = rng.choice((10, 1000, 100_000))
                lines[index] += (
                    rng.choice(("[", "{", "(", "- ", "<module name='m'>", "{% if 1 %}", "{{ (", "{{ '" + "a'+'"))
                    * depth
                )
        return "\n".join(lines).encode(errors="surrogatepass")

    # -- JSON ---------------------------------------------------------------------------------------------

    def value(self) -> Any:
        """Return an extreme value of a random type."""
        rng = self.rng
        match rng.randrange(8):
            case 0:
                return rng.choice((None, True, False))
            case 1 | 2:
                return rng.choice(NUMBERS)
            case 3:
                return rng.choice(FLOATS)
            case 4 | 5:
                return rng.choice(self.texts)
            case 6:
                return rng.choice(
                    ([], {}, [[]], [None], {"": 0}, [0] * 1000, ["x"], {"a": {"b": []}}, [[0, 1], [2, 3]])
                )
        return rng.randrange(-100, 1000)

    def change(self, tree: Any) -> Any:
        """Change one place of a tree of JSON values, in place where it can be."""
        rng, places = self.rng, list(_places(tree))
        if not places:
            return self.value()
        parent, key = rng.choice(places)
        match rng.randrange(8):
            case 0 | 1:
                parent[key] = self.value()
            case 2 if isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
                parent[key] = rng.choice(
                    (-parent[key], parent[key] * 2, parent[key] + 1, parent[key] * 1000, float(parent[key]))
                )
            case 2:
                parent[key] = copy.deepcopy(rng.choice(places)[0])
            case 3:
                del parent[key]
            case 4:
                other, place = rng.choice(places)
                parent[key], other[place] = other[place], copy.deepcopy(parent[key])
                if any(x is y for x, y in ((parent[key], parent), (other[place], other))):
                    return self.value()
            case 5 if isinstance(parent, dict):
                name = rng.choice(list(self.keys))
                parent[name] = self.keys[name]
            case 5:
                parent.extend(copy.deepcopy(parent[:1]) * rng.choice((1, 10, 1000)))
            case 6 if isinstance(parent, dict):
                parent[rng.choice((*self.texts, *map(str, NUMBERS)))] = parent.pop(key)
            case 6:
                parent.reverse()
            case _:
                parent[key] = [parent[key]] if rng.random() < 0.5 else {"a": parent[key]}
        return tree

    def write_json(self, tree: Any) -> str:
        """Write JSON, at times with a member twice or nested deep."""
        text = json.dumps(tree, ensure_ascii=self.rng.random() < 0.5)
        draw = self.rng.random()
        if draw < 0.03:
            depth = self.rng.choice((100, 5000, 200_000))
            return text.replace("0", "[" * depth + "]" * depth, 1)
        if draw < 0.06 and text.startswith("{") and isinstance(tree, dict) and tree:
            name = self.rng.choice(list(tree))
            return "{" + f"{json.dumps(name)}: {json.dumps(self.value())}, " + text[1:]
        if draw < 0.08:
            return text.replace("1", "1" * self.rng.choice((20, 400, 5000)), 1)
        return text

    def mutate_json(self, data: bytes) -> bytes:
        tree = json.loads(data)
        for _ in range(self.rng.choice((1, 1, 1, 2, 4))):
            tree = self.change(tree)
        return self.write_json(tree).encode(errors="surrogatepass")

    def mutate_json_lines(self, data: bytes) -> bytes:
        lines = data.split(b"\n")
        index = self.rng.choice([i for i, line in enumerate(lines) if line.strip()] or [0])
        lines[index] = self.mutate_json(lines[index])
        return b"\n".join(lines)

    def mutate_yaml(self, data: bytes) -> bytes:
        """Change a mapping as JSON, which is YAML too, or its text with tags and aliases of YAML."""
        import yaml

        if self.rng.random() < 0.6:
            tree = yaml.safe_load(data)
            return yaml.safe_dump(self.change(tree)).encode(errors="surrogatepass")
        tags = (
            f"!!python/object/apply:os.system ['touch {self.canary}']",
            f'!!python/object/new:os.system ["touch {self.canary}"]',
            "!!python/name:os.system",
            "&a [*a]",
            "*missing",
            "&a {<<: *a}",
            "!!binary 'AAAA'",
            "!!timestamp 2001-99-99",
            "!!timestamp 99999-01-01",
            "!!int ''",
            "!!float 'x'",
            "!!set {a, b}",
            "? [a, b]\n  : c",
            "0x" + "f" * 5000,
            "1" * 5000,
            "190:20:30:99999999999999",
            "2001-12-99",
            "|\n  \t",
            "[" * 3000,
            "{a: " * 3000,
            "- " * 3000,
            _laughs(),
        )
        lines = data.decode(errors="replace").split("\n")
        index = self.rng.randrange(len(lines))
        head = lines[index].partition(":")[0]
        lines[index] = f"{head}: {self.rng.choice(tags)}"
        return "\n".join(lines).encode()

    # -- binary formats -----------------------------------------------------------------------------------

    def mutate_container(self, data: bytes) -> bytes:
        """Change safetensors or a container of KV: size of the header, header, or data."""
        (size,) = struct.unpack_from("<Q", data)
        header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
        draw = self.rng.random()
        if draw < 0.15:
            return struct.pack("<Q", self.rng.choice((*U64, size + 1, size - 1))) + data[8:]
        if draw < 0.25:
            return data[: 8 + size] + self.mutate_bytes(rest)
        metadata = header.get("__metadata__")
        inner = [
            key for key in ("entries", "details") if isinstance(metadata, dict) and isinstance(metadata.get(key), str)
        ]
        if inner and draw < 0.8:  # JSON inside of a string
            name = self.rng.choice(inner)
            assert isinstance(metadata, dict)
            metadata[name] = self.write_json(self.change(json.loads(metadata[name])))
        else:
            header = self.change(header)
        separators = (",", ":") if self.rng.random() < 0.8 else None
        text = json.dumps(header, separators=separators).encode(errors="surrogatepass")
        text += b" " * (-len(text) % 8)
        raw = struct.pack("<Q", len(text)) + text
        if inner and self.rng.random() < 0.9:  # the checksum of the header, so that the header is read
            rest = xxhash.xxh3_64_digest(raw) + rest[8:]
        return raw + rest

    def mutate_gguf(self, data: bytes) -> bytes:
        fields = split_gguf(data)
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            self._change_gguf(fields)
        return b"".join(field.pack() for field in fields)

    def _change_gguf(self, fields: list["GGUFField"]) -> None:
        rng = self.rng
        kind = rng.choice(("count", "type", "number", "number", "text", "text", "group", "data"))
        if kind == "group":  # a key or a tensor twice, lost, or moved
            groups = sorted({field.group for field in fields if field.group})
            group = rng.choice(groups)
            chosen = [copy.copy(field) for field in fields if field.group == group]
            start = next(i for i, field in enumerate(fields) if field.group == group)
            match rng.randrange(3):
                case 0:
                    fields[start:start] = chosen
                case 1:
                    fields[:] = [field for field in fields if field.group != group]
                case 2:
                    fields[start : start + len(chosen)] = []
                    fields[rng.randrange(len(fields)) : 0] = chosen
            return
        places = [field for field in fields if field.kind == kind]
        if not places:
            return
        field = rng.choice(places)
        if kind == "data":
            field.value = self.mutate_bytes(field.value)
        elif kind == "text":
            others = [other.value for other in places]
            field.value = rng.choice((*others, *(text.encode(errors="surrogatepass") for text in self.texts)))
            field.value = field.value[: rng.choice((3, 1000))] if rng.random() < 0.1 else field.value
        elif field.format in ("f", "d"):
            field.value = rng.choice(FLOATS[:-4] if field.format == "f" else FLOATS)
        elif kind == "type":
            field.value = rng.choice((*range(14), 20, 30, 39, 255, (1 << 32) - 1))
        else:
            values = {"Q": U64, "q": U64[:-4], "I": U32, "i": U32[:-2]}.get(field.format, (0, 1, 2, 127))
            small = abs(field.value) < 1000
            near = (field.value + 1, max(field.value - 1, 0), field.value * 2) if small else values
            field.value = rng.choice(near if rng.random() < 0.3 else values)
            if field.format in ("b", "B", "h", "H"):
                field.value %= 128


@dataclass
class GGUFField:
    """One number, string or data of a GGUF file."""

    kind: str  # "count" (of keys, items, characters), "type", "number", "text" or "data"
    format: str  # of struct; "" for bytes
    value: Any
    group: str = ""  # key or tensor that it belongs to

    def pack(self) -> bytes:
        return self.value if not self.format else struct.pack(f"<{self.format}", self.value)


_GGUF_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def split_gguf(data: bytes) -> list[GGUFField]:
    """Split a valid GGUF file into its fields, in order."""
    fields, place = [], 0

    def number(kind: str, format: str, group: str = "") -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{format}", data, place)
        place += struct.calcsize(format)
        fields.append(GGUFField(kind, format, value, group))
        return value

    def text(group: str) -> bytes:
        nonlocal place
        size = number("count", "Q", group)
        value = data[place : place + size]
        place += size
        fields.append(GGUFField("text", "", value, group))
        return value

    def item(kind: int, group: str) -> None:
        if kind == 8:
            text(group)
        elif kind == 9:
            inner, count = number("type", "I", group), number("count", "Q", group)
            for _ in range(count):
                item(inner, group)
        else:
            number("number", _GGUF_FORMATS[kind], group)

    number("number", "I")
    number("number", "I")
    num_tensors, num_keys = number("count", "Q"), number("count", "Q")
    for index in range(num_keys):
        group = f"key {index}"
        text(group)
        item(number("type", "I", group), group)
    for index in range(num_tensors):
        group = f"tensor {index}"
        text(group)
        for _ in range(number("count", "I", group)):
            number("number", "Q", group)
        number("type", "I", group)
        number("count", "Q", group)
    fields.append(GGUFField("data", "", data[place:]))
    return fields


def _places(tree: Any, limit: int = 5000) -> list[tuple[Any, Any]]:
    """Return (parent, key) of every value inside a tree; those of long lists by sample."""
    result, stack = list[tuple[Any, Any]](), [tree]
    while stack and len(result) < limit:
        parent = stack.pop()
        keys = list(parent) if isinstance(parent, dict) else range(len(parent)) if isinstance(parent, list) else ()
        for key in list(keys)[:20] + list(keys)[-5:] if len(keys) > 25 else keys:
            result.append((parent, key))
            stack.append(parent[key])
    return result


def _laughs() -> str:
    """Return a YAML value whose aliases expand to billions."""
    names = "abcdefghij"
    lists = [f"&{name} [{', '.join([f'*{names[i - 1]}' if i else 'x'] * 10)}]" for i, name in enumerate(names)]
    return f"[{', '.join(lists)}]"


_BY_SUFFIX: dict[str, Callable[[Mutator, bytes], bytes]] = {
    "json": Mutator.mutate_json,
    "jsonl": Mutator.mutate_json_lines,
    "yaml": Mutator.mutate_yaml,
    "safetensors": Mutator.mutate_container,
    "gguf": Mutator.mutate_gguf,
}
