"""Broken and hostile input: a fixed corpus of ways to damage a checkpoint, an artifact or a scheme file.

A damage is a function that changes a folder in place. Values are put at every place of a document, one at a time.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Damage = Callable[[Path], object]

MISSING = object()
VALUES: tuple[Any, ...] = (
    MISSING,
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    1.5,
    float("nan"),
    float("inf"),
    2**31,
    2**63,
    10**30,
    10**400,
    -(10**30),
    "",
    "x",
    "2",
    "\x1b[31m",
    "[/red]",
    "\ud800",
    "../../x",
    "/etc/passwd",
    "a" * 10_000,
    [],
    [None],
    [1, "x"],
    [[]],
    {},
    {"kind": "x"},
    {"x": {"y": []}},
)
"""What no field expects, or only some do."""

DEEP = 100_000


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document, sections included."""
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def put(document: Any, place: tuple[Any, ...], value: Any) -> None:
    """Put a value at a place, or take away what is there."""
    *parents, leaf = place
    for parent in parents:
        document = document[parent]
    if value is MISSING:
        del document[leaf]
    else:
        document[leaf] = value


def edit(name: str, place: tuple[Any, ...], value: Any) -> Damage:
    """Change one place of a JSON file."""

    def damage(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        put(document, place, value)
        (folder / name).write_text(json.dumps(document))

    return damage


def write(name: str, content: str | bytes) -> Damage:
    """Replace a file."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def edit_header(name: str, place: tuple[Any, ...], value: Any) -> Damage:
    """Change one place of a safetensors header; the data stays."""

    def damage(folder: Path) -> None:
        header, data = read_header(folder / name)
        put(header, place, value)
        text = json.dumps(header).encode()
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + data)

    return damage


def patch(name: str, offset: int, payload: bytes) -> Damage:
    """Overwrite bytes of a file; a negative offset counts from its end."""

    def damage(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        start = offset if offset >= 0 else max(len(raw) + offset, 0)
        raw[start : start + len(payload)] = payload
        (folder / name).write_bytes(raw)

    return damage


def link(name: str, target: str) -> Damage:
    """Put a symbolic link in the place of a file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.symlink(target, folder / name)

    return damage


def fifo(name: str) -> Damage:
    """Put a pipe that nobody writes to in the place of a file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def sparse(name: str, size: int) -> Damage:
    """Make a file so long without writing so much."""

    def damage(folder: Path) -> None:
        with open(folder / name, "ab") as file:
            file.truncate(size)

    return damage


def folder_there(name: str) -> Damage:
    """Put a directory in the place of a file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return damage


def json_files(name: str, sample: Any) -> Iterator[tuple[str, Damage]]:
    """What can be wrong with any JSON file, and every value at every place of `sample`."""
    texts = {
        "empty": "",
        "no JSON": "{",
        "two documents": "{}{}",
        "list": "[]",
        "text": '"x"',
        "number": "1",
        "null": "null",
        "NaN": "NaN",
        "deep lists": "[" * DEEP + "]" * DEEP,
        "deep objects": '{"a":' * DEEP + "1" + "}" * DEEP,
        "deep field": '{"model_type":' + "[" * 500 + "]" * 500 + "}",
        "long number": '{"hidden_size": ' + "9" * 10_000 + "}",
        "byte order mark": "\ufeff{}",
        "many fields": json.dumps(dict.fromkeys(map(str, range(20_000)), 0)),
    }
    yield from ((f"{name} {label}", write(name, text)) for label, text in texts.items())
    yield f"{name} no UTF-8", write(name, b"\xff\xfe{\x00}\x00")
    yield f"{name} zeros", write(name, bytes(4096))
    yield f"{name} huge", sparse(name, 1 << 40)
    yield f"{name} pipe", fifo(name)
    yield f"{name} device", link(name, "/dev/zero")
    yield f"{name} loop", link(name, name)
    yield f"{name} dangling", link(name, "../nowhere/at/all")
    yield f"{name} folder", folder_there(name)
    for place in places(sample):
        for value in VALUES:
            label = "missing" if value is MISSING else repr(value)[:20]
            yield f"{name} {'.'.join(map(str, place))} = {label}", edit(name, place, value)


def safetensors_files(name: str, sample: dict[str, Any]) -> Iterator[tuple[str, Damage]]:
    """Headers that lie, for one tensor in every way, and lengths that lie."""
    for length in (0, 1, 2, 7, 1 << 20, (100 << 20) + 1, 1 << 31, 1 << 62, (1 << 64) - 1):
        yield f"{name} length {length}", patch(name, 0, length.to_bytes(8, "little"))
    tensors = sorted(sample.keys() - {"__metadata__"})
    tensor, other = tensors[len(tensors) // 2], tensors[0]
    for place in ((tensor,), *((tensor, *rest) for rest in places(sample[tensor]))):
        for value in (
            *VALUES,
            "F64",
            "F4",
            "U64",
            [0, 4],
            [0, 1 << 62],
            [-4, 4],
            [8, 4],
            [1] * 1000,
            [0, 10**400],
            [2**32, 2**32],
        ):
            yield (
                f"{name} {place[1:]} = {'missing' if value is MISSING else repr(value)[:20]}",
                edit_header(name, place, value),
            )
    yield f"{name} overlap", edit_header(name, (tensor, "data_offsets"), sample[other]["data_offsets"])
    yield f"{name} second name", edit_header(name, ("again",), sample[tensor])
    yield f"{name} metadata", edit_header(name, ("__metadata__",), {"a": [1]})
    yield f"{name} empty tensor", edit_header(name, ("none",), {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    for size in (0, 4, 8, 9, 100, 1 << 40):
        yield f"{name} of {size} bytes", sparse(name, size)
    yield f"{name} deep", write(name, (2 * DEEP).to_bytes(8, "little") + b"[" * DEEP + b"]" * DEEP)
    yield f"{name} pipe", fifo(name)
    yield f"{name} device", link(name, "/dev/zero")
    yield f"{name} loop", link(name, name)
    yield f"{name} folder", folder_there(name)


SHARD_NAMES = (
    "../../x",
    "../model.safetensors",
    "/etc/passwd",
    "/dev/zero",
    "a/b.safetensors",
    "..",
    ".",
    "",
    "model.safetensors/",
    "\x00",
    "config.json",
    "kvcompile.safetensors",
    "kvcompile.json",
    "model.safetensors.index.json",
    "nowhere.safetensors",
    "a" * 5000,
    "\ud800.safetensors",
    "..\\x.safetensors",
    "C:\\x.safetensors",
    "C:x",
    "~/x.safetensors",
    "$HOME.safetensors",
    "file:///etc/passwd",
    "./model-00001-of-00002.safetensors",
)


def indexes(name: str, sample: dict[str, Any]) -> Iterator[tuple[str, Damage]]:
    """An index that names other files than its shards."""
    tensors = sorted(sample["weight_map"])
    for shard in SHARD_NAMES:
        yield f"{name} one {shard[:20]!r}", edit(name, ("weight_map", tensors[0]), shard)
        yield f"{name} all {shard[:20]!r}", edit(name, ("weight_map",), dict.fromkeys(tensors, shard))
    yield f"{name} names another", edit(name, ("weight_map", tensors[0]), sample["weight_map"][tensors[-1]])


def scheme_texts(text: str, sample: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Scheme files: bombs, and every value at every place, as TOML can say them."""
    bombs = {
        "deep array": "a = " + "[" * DEEP + "]" * DEEP,
        "deep table": "a = " + "{a=" * 5000 + "1" + "}" * 5000,
        "deep key": ".".join("a" * 30_000) + " = 1",
        "deep header": "[" + ".".join("a" * 30_000) + "]",
        "many headers": "\n".join(f"[{'.'.join('a' * 90)}.b{i}]" for i in range(300)),
        "huge text": f'name = "{"a" * (8 << 20)}"',
        "huge number": "a = " + "9" * 60_000,
        "hex": "a = 0x" + "f" * 60_000,
        "float": "a = " + "9" * 60_000 + "e9",
        "open text": 'a = """' + "x" * 60_000,
        "quotes": 'a = "' + "\\" * 60_000,
        "comments": "#\n" * 30_000,
        "many layers": text + "\n".join(f'[layers."{i}-999".key.quantizer]\nbits = 4' for i in range(900)),
        "wide layers": text + "\n".join(f'[layers."{i}-999,0-999,1-999".key.quantizer]\nbits = 4' for i in range(250)),
        "layers beyond": text + '\n[layers."0-99999999999".key.quantizer]\nbits = 4',
        "endless layers": text + f'\n[layers."{"0-999," * 9000}0".window]\nsink = 4',
        "layer digits": text + f'\n[layers."{"9" * 5000}".window]\nsink = 4',
        "control": "a = \x01",
        "nul": "\x00",
        "empty": "",
        "binary": "\ufffd" * 100,
        "twice": text + text,
        "seed": 'name = "x"\nsummary = ""\n[key.rotation]\nkind = "random"\nseed = ' + "9" * 30 + "\n[value]",
        "date": text + "\n[layers.0.window]\nsink = 1979-05-27T07:32:00Z",
        "nan": text + "\n[layers.0.key.quantizer]\ndamping = nan",
    }
    yield from bombs.items()
    for place in places(sample):
        for value in VALUES:
            if value is MISSING or not (isinstance(value, (dict, list)) or value is None):
                document = json.loads(json.dumps(sample))
                put(document, place, value)
                yield (
                    f"{'.'.join(map(str, place))} = {'missing' if value is MISSING else repr(value)[:20]}",
                    _toml(document),
                )


def _toml(document: dict[str, Any]) -> str:
    """A document as TOML, all sections inline."""
    return "\n".join(f"{_key(name)} = {_inline(value)}" for name, value in document.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_inline(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, float) or value in (True, False):
        return str(value).lower() if isinstance(value, (bool, float)) else str(value)
    return json.dumps(value, ensure_ascii=True) if isinstance(value, str) else str(value)


def _key(name: str) -> str:
    return json.dumps(name)
