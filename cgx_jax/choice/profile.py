"""What `tune` measured on one machine's links, and its JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple, get_type_hints

from cgx_jax.exchanges.base import Exchange
from cgx_jax.exchanges.table import EXCHANGES
from cgx_jax.host import installation, untrusted

SCHEMA = 5
MOST_ROWS = 10_000
MOST_RANKS = 1 << 20
ONE_SHOT = "/gather_sum"  # after an exchange's name: with that reduction, not the default
METHODS = (
    "psum",
    *(exchange.shorthand for exchange in EXCHANGES),
    *(exchange.shorthand + ONE_SHOT for exchange in EXCHANGES if "gather" in exchange.can),
)
_AGAIN = "Run cgx_jax.tune again, or use_profile(None) to follow the default rule."


class Row(NamedTuple):
    """Median seconds of one all-reduce of `bytes` fp32 bytes at `bits` payload bits per value."""

    method: str
    bits: float
    bytes: int
    seconds: float


class Codec(NamedTuple):
    """Seconds per value that a rank spends on encoding, reducing and decoding in one all-reduce.

    `plain` is rounding to nearest, `noise` rounding at random, `rotation` rounding of rotated
    buckets to nearest, `units` rounding of values in units of preconditioning to nearest. The work
    depends on the number of ranks; these are the seconds for the profile's number.
    """

    plain: float
    noise: float
    rotation: float
    units: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """How long `lax.psum` and each exchange take on the links of one mesh axis.

    * `cpu`, `cores`, `device` (JAX's device kind), `processes` and `hosts` name the machines.
    * `jax`, `jaxlib`, `cgx_jax` and `mpi` (the MPI library, or None) are versions.
    * `world` and `axis` are the number of ranks and the name of the axis.
    * `latency` is the seconds of a psum of one value, `algbw` the bytes per second of the largest
      psum.
    * `codec` is the seconds per value of encoding and decoding, with nothing sent.
    * `rows` are the measurements, of plain rounding: (method, payload bits per value, bytes,
      seconds). A method is "psum" (32 bits), an exchange, or an exchange with the reduction
      "gather_sum".
    * `engine` is the exchange whose options `tune` chose, "mpi" or "nccl", with the options that it
      was measured with; None without either.

    Raises ValueError for values that no measurement can give, and for text that is too long or not
    printable.
    """

    cpu: str
    cores: int
    device: str
    processes: int
    hosts: int
    jax: str
    jaxlib: str
    cgx_jax: str
    mpi: str | None
    world: int
    axis: str
    latency: float
    algbw: float
    codec: Codec
    rows: tuple[Row, ...]
    engine: Exchange | None = None

    def __post_init__(self) -> None:
        try:
            for name, kind in get_type_hints(Profile).items():
                given = getattr(self, name)
                as_kind = _engine(given) if name == "engine" else untrusted.typed(given, kind, name)
                object.__setattr__(self, name, as_kind)
            self._check()
        except ValueError as error:
            raise ValueError(f"Profile: {error}. {_AGAIN}") from None

    def _check(self) -> None:
        for name in ("cpu", "device", "jax", "jaxlib", "cgx_jax", "mpi", "axis"):
            untrusted.check_text(getattr(self, name) or "", installation.MOST_NAME)
        for name, least in {"cores": 1, "processes": 1, "hosts": 1, "world": 2}.items():
            untrusted.whole(getattr(self, name), name, least, MOST_RANKS)
        codec = {f"codec {kind}": seconds for kind, seconds in self.codec._asdict().items()}
        for name, value in ({"latency": self.latency, "algbw": self.algbw} | codec).items():
            untrusted.positive(value, name)
        if len(self.rows) > MOST_ROWS:
            raise ValueError(f"{len(self.rows)} rows exceed the limit of {MOST_ROWS}")
        for row in self.rows:
            fits = row.method in METHODS and 0 < row.bits <= 32
            if not (fits and 0 < row.bytes <= untrusted.MOST_SIZE and 0 < row.seconds < math.inf):
                raise ValueError(
                    f"row {untrusted.shown(list(row))} needs a method of {list(METHODS)}, bits in "
                    f"0..32, bytes in 1..{untrusted.MOST_SIZE} and positive seconds"
                )
        if "psum" not in {row.method for row in self.rows}:
            raise ValueError("no row has the method psum, the baseline")
        if len({row[:3] for row in self.rows}) < len(self.rows):
            raise ValueError("two rows have the same method, bits and bytes")

    def to_json(self) -> str:
        """The profile as text, one line per row."""
        fields = {"schema": SCHEMA} | dataclasses.asdict(self)
        fields["codec"] = self.codec._asdict()
        if self.engine is not None:
            chosen = {name: getattr(self.engine, name) for name in self.engine.tuned}
            fields["engine"] = {"exchange": self.engine.shorthand} | chosen
        rows = ",\n  ".join(json.dumps(row) for row in fields.pop("rows"))
        return json.dumps(fields, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote; raises ValueError for any other text."""
        try:
            fields = untrusted.loads(text)
            untrusted.check_version(fields, "schema", SCHEMA)
            del fields["schema"]
            untrusted.check_names(fields, cls, "it")
        except ValueError as error:
            raise ValueError(f"Profile: the text cannot be read: {error}. {_AGAIN}") from None
        return cls(**fields)

    def check_here(self, hosts: int | None = None) -> None:
        """Raises ValueError if the machine, processes, versions or `hosts` are not those measured.

        None stands for a number of hosts that is not known.
        """
        here = installation.facts() | ({} if hosts is None else {"hosts": hosts})
        for name, own in here.items():
            measured = getattr(self, name)
            if measured != own:
                raise ValueError(
                    f"Profile: it was measured with {name} {measured!r}, but here it is {own!r}. "
                    f"{_AGAIN}"
                )


def _engine(engine: Any) -> Exchange | None:
    tuned = {exchange.shorthand: exchange for exchange in EXCHANGES if exchange.tuned}
    if engine is None or (isinstance(engine, Exchange) and engine.tuned):
        return engine
    options = dict(engine) if isinstance(engine, dict) else {}
    name = options.pop("exchange", None)
    known = tuned.get(name) if isinstance(name, str) else None
    if known is None or options.keys() != set(known.tuned):
        forms = " or ".join(f"exchange={x.shorthand!r}, {list(x.tuned)}" for x in tuned.values())
        raise ValueError(f"engine={untrusted.shown(engine)} must have {forms}")
    whole = {k: untrusted.whole(v, f"engine: {k}") for k, v in options.items()}
    return dataclasses.replace(known, **whole)  # type: ignore[type-var]
