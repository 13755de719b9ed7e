"""`value_and_grad` for programs under plain `jax.jit`: no shard_map to write.

The path of a call, and the file of each part:

    arguments    The loss's arguments become a flat list of arrays; everything else is static.
    split        Each array is split over the axis or whole: known, named or refused.
    manual       Shardings inside the loss may not name the axis.
    program      Loss and gradients are traced over the whole batch and over a rank's part. What
                 `relations` cannot prove equal is refused.
    gathers      A parameter that is sharded over the axis is gathered where the loss uses it.
    value_and_grad   In a shard_map, each rank runs the program of its part, and the gradients are
                 reduced with compression (reduction, model_axes).
"""
