"""The operations that :mod:`glm5ray.kernels.triton` serves, under the names of the table.

Each name of ``Provider("triton").ops`` is an attribute here; kernels themselves live in the folder, a file a family."""
