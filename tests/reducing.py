"""A mean with residuals, by the core's own call."""

import jax

from cgx_jax.core import Options, reduce_leaves
from cgx_jax.plan import resolve


def pmean_with_residual(name, tree, axis, plan, *, units=None, key=None, residual=True, **options):
    """Returns the mean of a tree over the ranks, and the list of this rank's residuals."""
    given = Options.resolve(name, axis, mean=True, **options)
    leaves, treedef = jax.tree.flatten(tree)
    made = reduce_leaves(
        given, leaves, resolve(name, tree, plan), key, residual=residual, units=units
    )
    return jax.tree.unflatten(treedef, made.values), made.residuals
