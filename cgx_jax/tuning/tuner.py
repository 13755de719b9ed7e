"""`Tuner`: finds the fastest way to reduce the gradients of a step on its first calls."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from cgx_jax.choice import auto
from cgx_jax.exchanges import Exchange, Mpi, Nccl, mpi
from cgx_jax.host import agreement, installation
from cgx_jax.host.console import Column, table_lines
from cgx_jax.plan import Plan
from cgx_jax.policies import Adaptive
from cgx_jax.policies.training_loop import Names, TrainingLoop
from cgx_jax.reductions import Levels, Reduction
from cgx_jax.reductions.named import named as reduction_named
from cgx_jax.route.route import Choices, Chooser, Options
from cgx_jax.tuning import cache as kept
from cgx_jax.tuning.candidates import Asked, Candidate, candidates, fits, streams
from cgx_jax.tuning.race import Search, Turns, search
from cgx_jax.tuning.setting import Offered, Setting

_log = logging.getLogger(__name__)
_COLUMNS = (
    Column(""),
    Column("setting"),
    Column("ms per step", right=True),
    Column("saved", right=True),
    Column("predicted", right=True),
)


class Tuner(Chooser):
    """Finds the fastest way to reduce a step's gradients, by races on the first training steps.

    Use it in two places. Pass it as `exchange` to `sync_gradients` or `reduce_in_backward`, which
    ask it while the step is traced. Call `tuner.jit(step)` instead of `jax.jit(step)`. Give an
    `Adaptive` policy to the tuner too, `Tuner(policy)`; the tuner's `jit` then serves both.

    The tuner chooses the exchange, the reduction, the levels, and how many bytes share a fusion
    buffer (of a given `Plan` too), but never a compressor. In the backward pass it tries smaller
    buffers. `reductions` (names or instances) are tried in addition to each compressor's first
    reduction; the default has less error than that. `levels` are tried too.

    The active profile (`use_profile`) ranks the settings; without a profile, the bytes that are
    sent rank them. The best-ranked settings, as many as `compilations` allows beside `lax.psum`,
    take turns for `rounds` rounds. The slower half drops out, and the rest go on for as many rounds
    again, until one is left. Lastly `lax.psum` takes turns with it, and it is kept if it is faster
    in three rounds of four. A turn is two steps, of which the second is timed. All of these are
    steps of the training, and must do equal work.

    The result is stored in the folder `cache`: by default the user's cache folder; False stores
    nothing. The same job, on the same machines and with the same versions, then starts with the
    stored setting. All processes follow process 0, which logs `table()` when the trials end.

    Raises ValueError for options that leave nothing to try, such as one compilation. Raises
    ValueError while tracing for levels that do not fit the mesh, and for a step that is not
    compiled by `jit`. Raises TypeError for a policy that is not `Adaptive` and for levels that are
    not `Levels`. Source: AIACC-Training (ICDCS 2022) for tuning on training steps.
    """

    words: ClassVar[Names] = Names("Tuner", "tuner", "setting")

    def __init__(
        self,
        policy: Adaptive | None = None,
        *,
        reductions: Sequence[Reduction | str] = ("gather_sum",),
        levels: Sequence[Levels] = (),
        compilations: int = 6,
        rounds: int = 8,
        cache: str | os.PathLike[str] | bool = True,
    ) -> None:
        for name, value, least in (("compilations", compilations, 2), ("rounds", rounds, 4)):
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"Tuner: {name}={value!r} must be a whole number of {least} or more, for a "
                    "race with lax.psum and for quartiles of it."
                )
        if policy is not None and not isinstance(policy, Adaptive):
            raise TypeError(
                f"Tuner: policy={policy!r} is not an Adaptive policy; pass other policies only to "
                "sync_gradients, since they do not need the tuner's jit."
            )
        if wrong := [x for x in levels if not isinstance(x, Levels)]:
            raise TypeError(f"Tuner: levels hold {wrong[0]!r}; pass a list of Levels(...).")
        self.compilations, self.rounds = compilations, rounds
        self._reductions = tuple(r for r in (reduction_named("Tuner", r) for r in reductions) if r)
        self._levels = tuple(levels)
        self._folder = kept.folder(cache)
        self._loop = TrainingLoop(self, *([] if policy is None else [policy]))
        self._used = False
        self.policy = policy
        self.traces = 0  # number of traced reductions
        self.running = False
        self.current = Setting()
        self._asked: list[Asked] = []
        self._found: list[Candidate] = []
        self._offered = Offered((), (), ())
        self._search: Search | None = None  # on process 0
        self._tried: list[Setting] = []
        self._turns: Turns | None = None
        self._history: list[tuple[list[Setting], np.ndarray]] = []  # races that ended
        self.state = "waiting"  # for the first step; then "trying", "kept" or "cached"

    def jit(self, step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Returns `jax.jit(step, **options)`, compiled for each setting that is tried.

        A tuner is for one step, which may be jitted already, in whole or in part.
        """
        if self._used:
            raise ValueError("Tuner: this tuner has a step already; make another Tuner.")
        self._used = True

        @functools.wraps(step)
        def asking(*args: Any, **kwargs: Any) -> Any:
            if self.state == "waiting":
                self._asked.clear()  # of a first trace that failed
            return step(*args, **kwargs)

        return self._loop.jit(asking, **options)

    def chosen(
        self, options: Options, plan: Plan, choices: Choices, *, in_units: bool
    ) -> tuple[Options, Plan]:
        """Returns the options and the plan of a call that is traced, by the current setting.

        Raises ValueError if the step is not compiled by `jit`.
        """
        if not self.running:
            raise ValueError(
                "Tuner: the step is not compiled by the tuner, so the tuner could never change its "
                "setting; write tuner.jit(step) instead of jax.jit(step)."
            )
        self.traces += 1
        if self.state == "waiting":
            self._asked.append(Asked(options, plan, in_units, _later(plan, choices)))
            self._offered = Offered(_exchanges(self._asked), self._reductions, self._levels)
            # Done here, where the axes are bound, because levels are checked against them.
            self._found = candidates(self._asked, self._offered, auto.active())
        return self.current.applied(options, plan)

    # --- what the loop asks.

    @property
    def key(self) -> Setting:
        """The setting for which a step is compiled."""
        return self.current

    @property
    def bound(self) -> bool:
        """Whether it is known what the step reduces."""
        return self.state != "waiting"

    @property
    def trying(self) -> bool:
        """Whether the next step is a trial."""
        return self._turns is not None

    def begin(self) -> None:
        """Has nothing to compare before it knows what the step reduces."""

    def before(self) -> None:
        """Chooses the setting of the next step."""
        if self.state == "waiting":
            self._start()
        if self._turns is not None and self._turns.done:
            self._decide()
        if self._turns is not None:
            self.current = self._tried[self._turns.current]

    def after(self, out: Any, seconds: float, fresh: bool) -> None:
        """Notes the time of a trial."""
        if self._turns is not None:
            self._turns.record(seconds)

    # --- what it decides.

    def _start(self) -> None:
        """Starts with the setting that process 0 has in its cache, or with trials."""
        key = self._key()
        # Options of exchanges may differ: those of process 0 hold for all.
        asked = key.tree, *(key.topology[k] for k in ("exchanges", "reductions", "levels"))
        agreement.require_same(
            asked,
            "Tuner: the plans, the reductions, the levels or the usable exchanges",
            "give every process the same ones",
        )
        found = [c.setting for c in self._found]
        first = found
        if jax.process_index() == 0 and len(found) > 1:
            known = None
            if self._folder is not None:
                known = kept.find(self._folder, key, self._parsed)
            if known is not None:
                first = [known]
            else:
                self._search = search(found[0], found[1 : self.compilations])
                first = next(self._search)
        self.state = "kept" if len(found) == 1 else "cached"
        self._follow(first)

    def _parsed(self, fields: Any) -> Setting:
        """Returns a setting of the cache; raises ValueError for one that the step cannot take."""
        setting = self._offered.setting(fields)
        # Levels are checked in the step, where the axes are bound.
        return setting if setting.levels is not None else fits(setting, self._asked)

    def _decide(self) -> None:
        """Ends the trials: process 0 decides what is tried next, or which setting is kept."""
        assert self._turns is not None
        seconds = agreement.maximum(self._turns.samples)
        self._history.append((self._tried, seconds))
        following: list[Setting] = []
        if self._search is not None:
            try:
                following = self._search.send(seconds)
            except StopIteration as end:
                following = [end.value]
        self.state = "kept"
        self._follow(following)
        if self.trying:
            return
        key = self._key()
        if jax.process_index() == 0:
            _log.warning("Tuner: %s is kept.\n%s", self.current, self.table())
            if self._folder is not None:
                kept.keep(self._folder, key, self.current.to_fields())

    def _follow(self, settings: Sequence[Setting]) -> None:
        """Starts trials of process 0's `settings`; if there is only one, it is kept."""
        message = json.dumps([self.rounds, [x.to_fields() for x in settings]]).encode()
        rounds, fields = json.loads(agreement.broadcast(message))
        self._tried = [self._offered.setting(x) for x in fields]
        self.current, self._turns = self._tried[0], None
        if len(self._tried) > 1:
            self.state, self._turns = "trying", Turns(len(self._tried), rounds)

    def _key(self) -> kept.Key:
        """Returns the key of this job in the cache; every process calls it."""
        tree = [
            [list(leaf.shape), str(leaf.dtype), *map(str, compressors), call.in_units]
            for call in self._asked
            for leaf, *compressors in zip(
                call.plan.leaves,
                call.plan.compressors,
                *(plan.compressors for plan in call.later),
                strict=True,
            )
        ]
        axes = [call.options.axes for call in self._asked]
        topology = installation.facts() | {
            "mpi": installation.mpi_library(),
            "hosts": agreement.hosts(),
            "axes": [[list(map(str, x.names)), x.world] for x in axes],
            "overlaps": [c.options.overlaps for c in self._asked],
            "exchanges": list(dict.fromkeys(e.shorthand for e in self._offered.exchanges)),
            "reductions": [r.shorthand for r in self._reductions],
            "levels": [str(x) for x in self._levels],
        }
        return kept.Key(topology, kept.digest(tree))

    # --- what others may see.

    def metrics(self) -> dict[str, float | str]:
        """Returns numbers and names for any logger, once a setting is known.

        docs/tuner.md lists them. The call does not wait for the device.
        """
        out: dict[str, float | str] = {"cgx/tuner": self.state, "cgx/setting": str(self.current)}
        for setting, seconds, saved, predicted in self._rows():
            out[f"cgx/seconds/{setting}"] = seconds
            out[f"cgx/saved/{setting}"] = saved
            if predicted is not None:
                out[f"cgx/predicted/{setting}"] = predicted
        return out

    def table(self) -> str:
        """Returns a table of the tried settings, predicted and measured; empty before the end."""
        rows = []
        for setting, seconds, saved, predicted in self._rows():
            says = "-" if predicted is None else f"{predicted * 1e3:.2f}"
            mark = "->" if setting == self.current else ""
            rows.append((mark, str(setting), f"{seconds * 1e3:.2f}", f"{saved * 1e3:.2f}", says))
        return "\n".join(table_lines(_COLUMNS, rows, gap="  ")) if rows else ""

    def _rows(self) -> list[tuple[Setting, float, float, float | None]]:
        """Returns, for each setting, median seconds per step, and the saving, also as predicted.

        There are no rows before the end of the trials, because savings are those over `lax.psum`.
        """
        if self.trying:
            return []
        saved: dict[Setting, float] = {Setting(): 0.0}
        # Each race has a setting in common with the next one; the last has lax.psum.
        for tried, seconds in reversed(self._history):
            common = next(i for i, setting in enumerate(tried) if setting in saved)
            less = saved[tried[common]] + np.median(seconds[:, [common]] - seconds, axis=0)
            for setting, own in zip(tried, less, strict=True):
                saved.setdefault(setting, float(own))
        predicted = {c.setting: c.seconds for c in self._found}
        exact = predicted.get(Setting())
        out = []
        for setting in dict.fromkeys(s for tried, _ in self._history for s in tried):
            samples = [t[:, tried.index(setting)] for tried, t in self._history if setting in tried]
            own = predicted.get(setting)
            gain = None if own is None or exact is None else exact - own
            out.append((setting, float(np.median(np.concatenate(samples))), saved[setting], gain))
        return out


def _later(plan: Plan, choices: Choices) -> tuple[Plan, ...]:
    """Returns plans in which each leaf has each of its possible compressors at least once."""
    count = max(map(len, choices), default=0)
    rows = [tuple(some[min(i, len(some) - 1)] for some in choices) for i in range(count)]
    return tuple(dataclasses.replace(plan, compressors=row) for row in rows)


def _exchanges(asked: Sequence[Asked]) -> tuple[Exchange, ...]:
    """Returns the exchanges that every reduction can use, with all options set.

    The options are those of the profile or, without one, the defaults. Without a profile, NCCL is
    offered with each number of streams.
    """
    axes = [call.options.axes.names for call in asked]
    usable = [e for e in auto.available(axes[0]) if all(e.usable(names) for names in axes)]
    profile = auto.active()
    offered: list[Exchange] = []
    for exchange in usable:
        if profile is not None and type(profile.engine) is type(exchange):
            offered.append(profile.engine)
        elif isinstance(exchange, Mpi):
            offered.append(mpi.defaults())
        elif isinstance(exchange, Nccl):
            offered += (dataclasses.replace(exchange, streams=count) for count in streams())
        else:
            offered.append(exchange)
    return tuple(offered)
