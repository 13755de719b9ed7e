"""The arrays that a loss closes over, treated as its arguments."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax

from cgx_jax.plain_jit.arguments import is_array, is_nnx


class Closure:
    """A function and the arrays that it closes over, which can be replaced.

    Arrays are found in closure cells of functions and in arguments of functools.partial, also in
    those of functions that these hold. `names` maps the id of every array to its path, and
    `variables` has the ids of each variable's arrays. Globals, and attributes of objects that are
    not pytrees, are not searched and stay as they are.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.arrays: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        self.variables: list[set[int]] = []
        self.statics: list[Any] = []  # closed-over values that are neither arrays nor functions
        self._visit(function, set())

    def replaced(self, arrays: Mapping[int, Any]) -> Callable[..., Any]:
        """Returns the function with some arrays replaced: `arrays` maps old ids to new arrays."""
        return self._rebuild(self.function, arrays, {}) if arrays else self.function

    def _visit(self, function: Any, seen: set[int]) -> None:
        if id(function) in seen:
            return
        seen.add(id(function))
        for name, value in _variables(function):
            if _looked_through(value):
                self._visit(value, seen)
            elif is_nnx(value):
                self.statics.append(value)
            else:
                held: set[int] = set()
                self.variables.append(held)
                for path, x in jax.tree_util.tree_leaves_with_path(value):
                    if _looked_through(x):
                        self._visit(x, seen)
                    elif is_array(x):
                        self.arrays[id(x)] = x
                        held.add(id(x))
                        self.names.setdefault(id(x), name + jax.tree_util.keystr(path))
                    else:
                        self.statics.append(x)

    def _rebuild(self, value: Any, arrays: Mapping[int, Any], made: dict[int, Any]) -> Any:
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            function, args, keywords = (self._swap(x, arrays, made) for x in parts)
            return functools.partial(function, *args, **keywords)
        if not isinstance(value, types.FunctionType) or not value.__closure__:
            return value
        if id(value) in made:
            return made[id(value)]
        # Cells without replaced arrays stay shared, since the function may write to them.
        held = [not _empty(c) and _holds(c.cell_contents, arrays) for c in value.__closure__]
        if not any(held):
            return value
        cells = tuple(
            types.CellType() if own else c for own, c in zip(held, value.__closure__, strict=True)
        )
        copy = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
        copy.__qualname__, copy.__module__ = value.__qualname__, value.__module__
        copy.__kwdefaults__, copy.__dict__ = value.__kwdefaults__, dict(value.__dict__)
        made[id(value)] = copy  # before the cells, since a recursive function closes over itself
        for new, old in zip(cells, value.__closure__, strict=True):
            if new is not old:
                new.cell_contents = self._swap(old.cell_contents, arrays, made)
        return copy

    def _swap(self, value: Any, arrays: Mapping[int, Any], made: dict[int, Any]) -> Any:
        if _looked_through(value):
            return self._rebuild(value, arrays, made)
        if is_nnx(value):
            return value
        leaves, treedef = jax.tree.flatten(value)
        if not any(id(x) in arrays for x in leaves) and not any(map(_looked_through, leaves)):
            return value
        swapped = [
            self._rebuild(x, arrays, made) if _looked_through(x) else arrays.get(id(x), x)
            for x in leaves
        ]
        return jax.tree.unflatten(treedef, swapped)


def _holds(value: Any, arrays: Mapping[int, Any]) -> bool:
    # As an argument of a partial, any value is visited like a variable.
    return not Closure(functools.partial(_holds, value)).arrays.keys().isdisjoint(arrays)


def _looked_through(value: Any) -> bool:
    return isinstance(value, (functools.partial, types.FunctionType))


def _variables(function: Any) -> list[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        return [
            ("function", function.func),
            *((f"argument {i}", x) for i, x in enumerate(function.args)),
            *function.keywords.items(),
        ]
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return []
    pairs = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return [(name, cell.cell_contents) for name, cell in pairs if not _empty(cell)]


def _empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True
