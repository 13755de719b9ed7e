"""Policies that look at a leaf's name and shape: ordered rules, and one compressor for all."""

from __future__ import annotations

import abc
import dataclasses
import re
import warnings
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from cgx_jax.compressors import Compressor, Identity, Quantize
from cgx_jax.leaves import Leaf

MIN_SIZE = 1024
# What calls take if the user names no compressor: the width of CGX, with the least loss per bit.
DEFAULT = Quantize(bits=4, rotation=True)


class Policy(abc.ABC):
    """Chooses a compressor for every leaf of a tree.

    For a policy of your own, define `choose`. A policy that `adapts` needs statistics from step to
    step, and therefore the state of `sync_gradients`; all other calls raise ValueError for it.
    """

    adapts: ClassVar[bool] = False

    @abc.abstractmethod
    def choose(self, leaves: Sequence[Leaf]) -> list[Compressor]:
        """One compressor per leaf, in order; each takes the leaf's dtype or is lossless."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Gives `compressor` to the leaves that meet every given condition.

    `path` is a regular expression that is searched for in the leaf's path, as in partition rules.
    `min_size` and `max_size` count values, `min_ndim` and `max_ndim` dimensions; both ends are
    included. `dtype` is the leaf's own. Leaves of a dtype that the compressor does not take are
    reduced exactly. Raises TypeError for anything that is not a compressor, and ValueError for a
    pattern that does not compile or limits that no leaf meets.
    """

    compressor: Compressor
    path: str | None = None
    min_size: int = 0
    max_size: int | None = None
    min_ndim: int = 0
    max_ndim: int | None = None
    dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise TypeError(
                f"Rule: {self.compressor!r} is not a compressor; pass an instance such as "
                "cgx_jax.Quantize(bits=4)."
            )
        try:
            re.compile(self.path or "")
        except re.error as error:
            raise ValueError(
                f"Rule: path={self.path!r} is not a regular expression ({error}); write a literal "
                "name with re.escape."
            ) from None
        for name in ("size", "ndim"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least < 0 or (most is not None and most < least):
                raise ValueError(
                    f"Rule: min_{name}={least} and max_{name}={most} do not form a range; pass a "
                    "minimum of 0 or more, and a maximum that is not smaller."
                )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def matches(self, leaf: Leaf) -> bool:
        """Whether every condition holds for `leaf`."""
        size = leaf.size, self.min_size, self.max_size
        ndim = len(leaf.shape), self.min_ndim, self.max_ndim
        if any(n < least or (most is not None and n > most) for n, least, most in (size, ndim)):
            return False
        found = self.path is None or re.search(self.path, leaf.path) is not None
        return found and (self.dtype is None or leaf.dtype == self.dtype)

    def __str__(self) -> str:
        said = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)[1:]
            if getattr(self, f.name) != f.default
        ]
        return f"Rule({self.compressor}{''.join(', ' + s for s in said)})"


def _word(*names: str) -> str:
    """Returns a pattern of whole words: in_proj_bias and LayerNorm have words, unbiased has not."""
    pattern = "|".join(names)
    capital = "|".join(name.capitalize() for name in names)
    small = rf"(?<![A-Za-z])(?:{pattern})(?![a-z])"
    return rf"(?:{small}|(?:{capital})(?![a-z])|(?<![A-Za-z])(?:{pattern.upper()})(?![A-Za-z]))"


_KINDS = ("layernorm", "batchnorm", "groupnorm", "instancenorm", "rmsnorm")
_NORM = _word("norms?", "normalization", "bn", "ln", "gn", *_KINDS)
# What may follow in the name of a norm: ln_f, norm1, layernorm_before, but not norm_mlp.
_PLACE = "[A-Za-z]|pre|post|in|out|init|first|last|final|before|after"
_NORM_ONLY = "scale|offset|gamma|beta"
_SUFFIX = rf"(?:_?\d+|_(?:{_PLACE}|{_NORM_ONLY}|weight)(?![A-Za-z]))*"
_NUMBERS = r"(?:[/.]\d+)*"  # places in lists; names in the style of PyTorch have dots
_BIASES = rf"{_word('bias', 'biases')}[^/.]*(?<!kernel)(?<!weight){_NUMBERS}$"
_NORMS = rf"{_NORM}{_SUFFIX}{_NUMBERS}(?:[/.][^/.]+{_NUMBERS})?$"
_SCALES = rf"{_NORM}[^/.]*{_NUMBERS}[/.](?:{_NORM_ONLY}){_NUMBERS}$"

# What CGX leaves exact: biases and normalization, by shape or by name (stacked layers give them
# more dimensions), and leaves whose few bytes do not pay for their error. Only the last names of a
# path count: a matrix inside a block called PreNorm is a matrix.
EXACT = (
    Rule(Identity(), max_ndim=1),
    Rule(Identity(), max_size=MIN_SIZE - 1),
    Rule(Identity(), path=_BIASES),
    Rule(Identity(), path=_NORMS),
    Rule(Identity(), path=_SCALES),
)


@dataclasses.dataclass(frozen=True)
class Rules(Policy):
    """The first rule that matches a leaf chooses for it; `default` is for leaves that none matches.

    The rules in `exact` come after the given ones. By default these are
    `cgx_jax.policies.rules.EXACT`, which reduce these leaves exactly: leaves with ndim <= 1, leaves
    under 1,024 values, leaves whose own name has the word bias, and leaves that are, or lie
    directly in, a module named as a norm (norm, bn, ln, gn). Names count by whole words:
    `PreNorm_0/qkv/kernel` and `unbiased/kernel` are compressed. `exact=()` leaves them out. A given
    rule that chooses for no leaf causes a UserWarning, since its path is most often misspelled.
    Raises TypeError for anything that is not a rule, or not a compressor. Source of the exact
    leaves: CGX (Markov et al., Middleware 2022).
    """

    rules: Sequence[Rule]
    default: Compressor = DEFAULT
    exact: Sequence[Rule] = EXACT

    def __post_init__(self) -> None:
        for name in ("rules", "exact"):
            given = getattr(self, name)
            if isinstance(given, Rule):
                raise TypeError(f"Rules: {name}={given!r} is one rule; pass a sequence, ({name},).")
            rules = tuple(given)
            for rule in rules:
                if not isinstance(rule, Rule):
                    raise TypeError(
                        f"Rules: {rule!r} is not a rule; write cgx_jax.Rule(compressor, path=...)."
                    )
            object.__setattr__(self, name, rules)
        if not isinstance(self.default, Compressor):
            raise TypeError(
                f"Rules: default={self.default!r} is not a compressor; pass an instance such as "
                "cgx_jax.Quantize(bits=4)."
            )

    def choose(self, leaves: Sequence[Leaf]) -> list[Compressor]:
        rules = (*self.rules, *self.exact)
        first = [next((r for r in rules if r.matches(leaf)), None) for leaf in leaves]
        for rule in self.rules:
            if not any(r is rule for r in first):
                self._report(rule, leaves)
        wanted = [self.default if rule is None else rule.compressor for rule in first]
        chosen = [
            c if c.lossless or c.supports(leaf.dtype) else Identity()
            for c, leaf in zip(wanted, leaves, strict=True)
        ]
        if not self.default.lossless and all(c.lossless for c in chosen):
            asked = [r for r in self.rules if r.compressor.lossless]
            pairs = zip(leaves, first, strict=True)
            self._report_exact([x for x, rule in pairs if not any(rule is r for r in asked)])
        return chosen

    def _report_exact(self, leaves: Sequence[Leaf]) -> None:
        """Warns that none of these leaves is compressed for its size or dtype, if any is a matrix.

        Nobody expects that of integers.
        """
        floating = (x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))
        matrices = [x for x in floating if len(x.shape) > 1]
        if not matrices or sum(leaf.size for leaf in leaves) < MIN_SIZE:
            return
        most = max(matrices, key=lambda leaf: leaf.size)
        why = f"fewer than {MIN_SIZE:,} values; Rules(..., exact=()) compresses these too"
        if not self.default.supports(most.dtype):
            why = f"{self.default} does not take {most.dtype}; cast gradients to float32"
        elif most.size >= MIN_SIZE:
            return
        warnings.warn(
            f"Rules: all leaves are reduced exactly, also {most}: {why}.", UserWarning, stacklevel=2
        )

    @staticmethod
    def _report(rule: Rule, leaves: Sequence[Leaf]) -> None:
        hidden = [leaf.path for leaf in leaves if rule.matches(leaf)]
        why = (
            f"earlier rules match all {len(hidden)} leaves that it matches, such as {hidden[0]!r}; "
            "move it up"
            if hidden
            else f"paths look like {[leaf.path for leaf in leaves[:3]]}; correct or drop the rule"
        )
        warnings.warn(
            f"Rules: {rule} applies to none of the {len(leaves)} leaves: {why}.",
            UserWarning,
            stacklevel=2,
        )


@dataclasses.dataclass(frozen=True)
class Uniform(Policy):
    """One compressor for every leaf that the rules `EXACT` do not keep exact.

    In every call that takes a policy, a bare compressor stands for `Uniform` of it.
    """

    compressor: Compressor = DEFAULT

    def choose(self, leaves: Sequence[Leaf]) -> list[Compressor]:
        return Rules((), self.compressor).choose(leaves)
