"""Mutated files for the tests of the loader and the converter: what a broken disk or a hostile author could leave."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

HUGE = (2**31, 10**12, 10**18, 2**63, 10**30)
ODD_VALUES = (
    None,
    True,
    -1,
    0,
    1,
    3,
    *HUGE,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../x",
    [],
    [1],
    {},
    {"a": []},
)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut, flip, overwrite, repeat, delete or insert, at places that favour the start, where headers are."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if not data:
            break
        at = rng.randrange(min(len(data), rng.choice((9, 300, 3000, len(data)))))
        kind = rng.randrange(7)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at] = rng.randrange(256)
        elif kind == 3:
            data[at : at + 8] = rng.choice(HUGE[:3]).to_bytes(8, "little")
        elif kind == 4:
            del data[at : at + rng.randrange(1, 64)]
        elif kind == 5:
            data[at:at] = rng.randbytes(rng.randrange(1, 64))
        else:
            data[at:at] = data[: rng.randrange(1, 200)]
    return bytes(data)


def mutate_json(value: object, rng: random.Random) -> object:
    """One value somewhere replaced by an odd one, one key dropped or added; now and then the whole."""
    value = json.loads(json.dumps(value))
    if rng.random() < 0.05:
        return _odd(rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = [(parent, key) for parent, key in _places(value)]
        if not places:
            break
        parent, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(("x", "dtype", "auto_map", "transformers_weights", "num_labels", "model_type"))] = _odd(
                rng
            )
        else:
            parent[key] = _odd(rng)
    return value


def _odd(rng: random.Random) -> object:
    return copy.deepcopy(rng.choice(ODD_VALUES))


def _places(value: object) -> Iterator[tuple]:
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Bytes, or the header as JSON: shapes, offsets, dtypes and names that are not those of the data."""
    if rng.random() < 0.5:
        return mutate_bytes(data, rng)
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(mutate_json(json.loads(data[8 : 8 + size]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def mutate_config(data: bytes, rng: random.Random) -> bytes:
    """JSON text, as values or as bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    return json.dumps(mutate_json(json.loads(data), rng)).encode()


MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": mutate_config,
    ".safetensors": mutate_safetensors,
}


def mutated(folder: Path, name: str, seed: int) -> bytes:
    """The file `name` of `folder`, mutated in a way that `seed` alone decides."""
    mutate = MUTATIONS.get(Path(name).suffix, mutate_bytes)
    return mutate((folder / name).read_bytes(), random.Random(f"{name} {seed}"))
