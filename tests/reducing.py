"""A mean with residuals, by the core's own call."""

import jax

from cgx_jax.kernels.units import Units
from cgx_jax.plan import resolve
from cgx_jax.route.route import Options, route
from cgx_jax.route.run import Inputs, run


def pmean_with_residual(name, tree, axis, plan, *, units=None, key=None, residual=True, **options):
    """Returns the mean of a tree over the ranks, and the list of this rank's residuals."""
    given = Options.resolve(name, axis, mean=True, **options)
    leaves, treedef = jax.tree.flatten(tree)
    taken = route(given, resolve(name, tree, plan))
    made = run(taken, Inputs(leaves, key, residual, Units.of(units or ())))
    return jax.tree.unflatten(treedef, made.values), made.residuals
