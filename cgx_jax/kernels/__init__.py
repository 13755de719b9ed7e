"""The codec as JAX operations: encode, reduce, decode, accumulate.

The rest of the package calls `primitives`. It lowers to the native handlers if `native` found them,
and to the plain-jnp `reference` everywhere else.
"""

from cgx_jax.kernels.native import backends as backends
