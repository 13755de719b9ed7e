"""What `tune` measured on one machine's links, and its JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple, get_type_hints

from cgx_jax import installation

SCHEMA = 1
METHODS = ("psum", "xla", "mpi", "nccl")
_AGAIN = "Run cgx_jax.tune again, or use_profile(None) to follow the default rule."


class Row(NamedTuple):
    """Median seconds of one all-reduce of `bytes` fp32 bytes at `bits` payload bits a value."""

    method: str
    bits: float
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """How long `lax.psum` and each exchange take on the links of one mesh axis.

    `cpu`, `cores`, `device` (JAX's device kind) and `hosts` name the machine, `jax`, `jaxlib`,
    `cgx_jax` and `mpi` (the MPI library, or None) the versions. `latency` is seconds of a psum of
    one value, `algbw` bytes a second of the largest psum. `rows` are the measurements; a method
    is "psum" (32 bits) or an exchange. `cgx_jax.tune` makes profiles. Raises ValueError or
    TypeError for values that no measurement gives.
    """

    cpu: str
    cores: int
    device: str
    hosts: int
    jax: str
    jaxlib: str
    cgx_jax: str
    mpi: str | None
    world: int
    axis: str
    latency: float
    algbw: float
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Profile).items():
            value = getattr(self, name)
            if name != "rows" and not isinstance(value, kind | int if kind is float else kind):
                raise TypeError(f"Profile: {name}={value!r} is not {kind}. {_AGAIN}")
        for name, least in {"cores": 1, "hosts": 1, "world": 2}.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"Profile: {name}={value} is under {least}. {_AGAIN}")
        for name in ("latency", "algbw"):
            value = getattr(self, name)
            if not _positive(value):
                raise ValueError(f"Profile: {name}={value} is not a positive number. {_AGAIN}")
        rows = tuple(_row(row) for row in self.rows)
        if "psum" not in {row.method for row in rows}:
            raise ValueError(f"Profile: rows have no psum to compare with. {_AGAIN}")
        if len({row[:3] for row in rows}) < len(rows):
            raise ValueError(f"Profile: two rows are of the same method, bits and bytes. {_AGAIN}")
        object.__setattr__(self, "rows", rows)

    def to_json(self) -> str:
        """The profile as text, a row a line."""
        fields = {"schema": SCHEMA} | dataclasses.asdict(self)
        rows = ",\n  ".join(json.dumps(row) for row in fields.pop("rows"))
        return json.dumps(fields, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote; raises ValueError for any other text."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"Profile: the text is not JSON ({error}). {_AGAIN}") from None
        if not isinstance(fields, dict) or not isinstance(fields.get("rows"), list):
            raise ValueError(f"Profile: the JSON is not an object with rows. {_AGAIN}")
        schema = fields.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(
                f"Profile: schema={schema!r}, this version of cgx_jax reads {SCHEMA}. {_AGAIN}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        if fields.keys() != known:
            raise ValueError(
                f"Profile: fields missing {sorted(known - fields.keys())}, unknown "
                f"{sorted(fields.keys() - known)}. {_AGAIN}"
            )
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def check_here(self) -> None:
        """Raises ValueError when this machine or its versions are not the measured ones."""
        for name, here in installation.facts().items():
            measured = getattr(self, name)
            if measured != here:
                raise ValueError(
                    f"Profile: it was measured with {name} {measured!r} and here is {here!r}. "
                    f"{_AGAIN}"
                )


def _row(row: Any) -> Row:
    if not isinstance(row, (tuple, list)) or len(row) != len(Row._fields):
        raise ValueError(f"Profile: row {row!r} is not {list(Row._fields)}. {_AGAIN}")
    made = Row(*row)
    if (
        made.method not in METHODS
        or not (_positive(made.bits) and made.bits <= 32)
        or not (isinstance(made.bytes, int) and made.bytes > 0)
        or not _positive(made.seconds)
    ):
        raise ValueError(
            f"Profile: row {list(row)} needs a method of {list(METHODS)}, bits in 0..32, whole "
            f"bytes and positive seconds. {_AGAIN}"
        )
    return made


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0
