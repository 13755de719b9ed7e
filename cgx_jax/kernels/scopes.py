"""The names by which traces show the phases of a call."""

from __future__ import annotations

from typing import Any, ClassVar

import jax


class Scoped:
    """A base class that runs methods of its subclasses in `jax.named_scope`s.

    `scopes` maps a method's name to the name of its scope. XProf and Perfetto then show encode,
    exchange, reduce and decode for every subclass, including those of users.
    """

    scopes: ClassVar[dict[str, str]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for method in vars(cls).keys() & getattr(cls, "scopes", {}).keys():
            setattr(cls, method, jax.named_scope(cls.scopes[method])(vars(cls)[method]))
