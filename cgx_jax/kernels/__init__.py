"""The codec as JAX operations: encode, reduce, decode, accumulate.

`primitives` is what the rest of the package calls. It lowers to the native handlers where
`native` found them and to the plain-jnp `reference` everywhere else.
"""

from cgx_jax.kernels.native import backends as backends
