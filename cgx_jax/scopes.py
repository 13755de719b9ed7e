"""The names that traces show for the phases of a call."""

from __future__ import annotations

from typing import Any, ClassVar

import jax


class Scoped:
    """A base whose subclasses' methods run in `jax.named_scope`s, named by `scopes`.

    XProf and Perfetto then show encode, exchange, reduce and decode, whoever wrote the subclass.
    """

    scopes: ClassVar[dict[str, str]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for method in vars(cls).keys() & getattr(cls, "scopes", {}).keys():
            setattr(cls, method, jax.named_scope(cls.scopes[method])(vars(cls)[method]))
